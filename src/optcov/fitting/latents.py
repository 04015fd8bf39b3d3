"""Data for models that are not of plain images: pictures become latents, captions become conditions, each once.

What is encoded is kept in a cache directory, in parts, so that a run that was stopped goes on. A part is known by the
weights of the encoder, the images and their order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov import storage
from optcov.bundle import Bundle
from optcov.bundle.latents import Codec
from optcov.bundle.loading import bundle_of
from optcov.checkpoints import ImportedModel
from optcov.checkpoints.families import MODELS
from optcov.data import ImageSet
from optcov.data.modes import with_channels
from optcov.data.tensors import DataSet, TensorSet, as_sets
from optcov.fitting.batches import Conditioned
from optcov.fitting.conditions import SLACK, Part, in_memory, open_parts, with_condition
from optcov.fitting.config import TrainingError
from optcov.identity import digest, digest_tensors
from optcov.networks import fingerprint
from optcov.networks.classes import LABELS, class_entries
from optcov.networks.taps import tap_of
from optcov.prediction import check_condition
from optcov.progress import track

LATENTS = "latents"  # the cache, in a directory of work
PART = 64  # images that are encoded and kept together


@contextmanager
def unless_refused(cache: Path | None) -> Iterator[None]:
    """Remove a cache that is new if what it was made for is refused, with the directory that was made for it."""
    fresh = [] if cache is None else [place for place in (cache, cache.parent) if not place.exists()]
    try:
        yield
    except ValueError:
        for place in fresh:
            if place == cache:
                shutil.rmtree(place, ignore_errors=True)
            elif place.is_dir() and not any(place.iterdir()):
                place.rmdir()
        raise


def foreign_parts(
    model: ImportedModel,
    data: Any,
    condition: Mapping[str, Tensor] | None,
    held_out: bool,
    wanted: tuple[int, int],
    cache: Path | None = None,
    progress: bool = True,
) -> tuple[Bundle, Part, Part | None]:
    """The bundle that a model makes with this data, and the train and test parts of the data as its network takes it.

    wanted: how many data points of each part are used at most; no more are encoded.
    """
    data, condition = with_condition(data, condition)
    if condition is not None:  # which belongs to data in memory, and is split with it
        values = _encoded(model, in_memory(data), cache, progress)
        condition = check_condition(condition, len(values))
        size = _picture_size(model, values) if _fits(model, condition, values) else None
        bundle = _bundle(model, values, size)
        return bundle, *open_parts(values, condition, held_out, bundle.image_shape, bundle.data_range, bundle.name)
    parts = [
        None if part is None else _some(part, most) for part, most in zip(as_sets(data, held_out), wanted, strict=True)
    ]
    for part in parts:  # before anything is encoded
        if part is not None and model.words is not None:
            _require_captions(model, part)
        if part is not None and part.labels is not None:
            _require_classes(model, part.labels, part.name)
    encoded = [None if part is None else _encoded(model, part, cache, progress) for part in parts]
    first = encoded[0]
    assert first is not None
    size = _picture_size(model, first)
    bundle = _bundle(model, first, size)
    told = [None if part is None else _told(model, part, size, cache, progress) for part in encoded]
    for part in encoded:
        if part is not None and part.shape != bundle.image_shape:
            raise TrainingError(f"{part.name} has data of shape {part.shape}, but that of training {first.shape}")
    assert told[0] is not None
    return bundle, told[0], told[1]


def _fits(model: ImportedModel, condition: Mapping[str, Tensor], part: DataSet) -> bool:
    """Whether what stands for no caption is of the form of a given condition, so that some of it can be left out."""
    if model.words is None or model.words.missing is not None:
        return False
    empty = model.words.empty(_picture_size(model, part))
    shapes = {name: value.shape[1:] for name, value in empty.items()}
    return bool(shapes) and all(shapes.get(name) == value.shape[1:] for name, value in condition.items())


def _bundle(model: ImportedModel, part: DataSet, size: tuple[int, int] | None) -> Bundle:
    """The model as a bundle for data like this."""
    shape = part.shape
    known = model.image_shape
    if model.decoder is not None and shape[0] != Codec(model.decoder).channels:
        raise TrainingError(
            f"{model.source} takes latents of {Codec(model.decoder).channels} channels, but the data has {shape[0]}; "
            f"give 8-bit images, which are encoded, or latents of its own decoder"
        )
    if known is not None and tuple(shape) != tuple(known) and not (model.any_size and shape[0] == known[0]):
        what = "latents" if model.decoder is not None else "data"
        raise TrainingError(
            f"{model.source} takes {what} of shape {tuple(known)}, but the data has {tuple(shape)}; use {what} like "
            f"those that it was trained on"
        )
    _require_patches(model, shape)
    if model.decoder is None and isinstance(part, TensorSet) and float(part.values.abs().max()) > 1 + SLACK:
        model = replace(model, data_range=None)  # no images: nothing tells where such data ends
    if model.words is not None and size is not None:
        model = replace(model, empty_condition=model.words.empty(size))
    return bundle_of(replace(model, image_shape=tuple(shape)))


def _require_patches(model: ImportedModel, shape: tuple[int, ...]) -> None:
    """Refuse data that the network cannot cut into patches."""
    side = tap_of(model.unet).patch if type(model.unet).__name__ in MODELS and model.layer is None else None
    if side is not None and len(shape) == 3 and (shape[1] % side or shape[2] % side):
        what, factor = ("data", 1) if model.decoder is None else ("latents", Codec(model.decoder).factor)
        raise TrainingError(
            f"{model.source} cuts {what} into patches of {side} x {side}, but the data has {what} of {shape[1]} x "
            f"{shape[2]}; use images whose sides {side * factor} divides"
        )


def _some(part: DataSet, most: int) -> DataSet:
    """As many data points as are used, in an order that stands for all."""
    if len(part) <= most or most < 1:
        return part
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:most]
    return part.select(order.sort().values)


def _encoded(model: ImportedModel, part: DataSet, cache: Path | None, progress: bool) -> DataSet:
    """Images as the network takes them: latents, if it is a network of those. Tensors are taken to be that."""
    if model.decoder is None or isinstance(part, TensorSet):
        if isinstance(part, ImageSet) and model.image_shape is not None:
            return with_channels(part, model.image_shape[0])
        return part
    codec = Codec(model.decoder)
    images = with_channels(part, codec.colours)
    if images.shape[0] != codec.colours:
        raise TrainingError(
            f"{images.name} has images of {images.shape[0]} channels, but the decoder of {model.source} takes "
            f"{codec.colours}; convert them first"
        )
    if images.shape[1] % codec.factor or images.shape[2] % codec.factor:
        raise TrainingError(
            f"{images.name} has images of shape {images.shape}, but the decoder of {model.source} takes sides that "
            f"{codec.factor} divides; scale or crop them"
        )
    identity = [fingerprint(model.decoder), *codec.scaling, images.checksum, "mode"]
    starts = range(0, len(images), PART)

    def encode(number: int) -> dict[str, Tensor]:
        return {"latents": codec.encode(images.x_0(slice(number * PART, (number + 1) * PART))).cpu()}

    names = track(range(len(starts)), len(starts), "latents", "batches", show=progress)
    found = [_kept(cache, f"images-{digest(identity)[:16]}-{number:05d}", number, encode) for number in names]
    values = torch.cat([part["latents"] for part in found])
    if not bool(values.isfinite().all()):
        raise TrainingError(
            f"the decoder of {model.source} turns images into NaN or infinity; check its weights, and its precision"
        )
    return TensorSet(values, images.labels, images.name, images.captions)


def _kept(cache: Path | None, name: str, number: int, make: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a file of the cache holds, or what is made now and kept there."""
    file = None if cache is None else cache / f"{name}.safetensors"
    if file is not None and file.is_file():
        return storage.read_tensors(file)[0]
    made = make(number)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.write_tensors(file, {key: value.contiguous() for key, value in made.items()})
    return made


def _picture_size(model: ImportedModel, part: DataSet) -> tuple[int, int]:
    """Height and width of the pictures that data becomes."""
    shape = part.shape
    if model.decoder is None or len(shape) != 3:
        return (int(shape[-1]), int(shape[-1]))
    factor = Codec(model.decoder).factor
    return shape[1] * factor, shape[2] * factor


def _told(model: ImportedModel, part: DataSet, size: tuple[int, int], cache: Path | None, progress: bool) -> Part:
    """A part with the condition that its captions give."""
    if model.words is None:
        return part
    assert part.captions is not None
    unique = list(dict.fromkeys(part.captions))
    table = _captions(model, unique, size, cache, progress)
    places = {caption: number for number, caption in enumerate(unique)}
    index = torch.tensor([places[caption] for caption in part.captions])
    known = {name: value[index] for name, value in table.items()}
    return Conditioned(part, known)


def _require_captions(model: ImportedModel, part: DataSet) -> None:
    model.words.require_encoders()
    if part.captions is None:
        raise TrainingError(
            f"{model.source} is told a caption of each image, but {part.name} has none; give (images, captions), a "
            f"folder with a metadata.csv of file_name and text, or condition="
        )


def _require_classes(model: ImportedModel, labels: Tensor, whose: str) -> None:
    entries, empty = class_entries(model.unet), model.empty_condition.get(LABELS)
    if entries is None:
        return
    known = [label for label in range(entries) if empty is None or label != int(empty)]
    strange = labels[~torch.isin(labels.cpu(), torch.tensor(known))]
    if len(strange):
        raise TrainingError(
            f"{whose} has images of class {int(strange[0])}, but the {len(known)} classes of {model.source} are "
            f"{known[0]} to {known[-1]}; number the classes as the model was trained"
        )


def _captions(
    model: ImportedModel, captions: Sequence[str], size: tuple[int, int], cache: Path | None, progress: bool
) -> dict[str, Tensor]:
    """The condition of each caption; text encoders are known by what they say of one, since they may be large."""
    probe = digest_tensors(model.words.encode(["a"], size))
    identity = digest([probe, list(size), list(captions)])[:16]
    starts = range(0, len(captions), PART)

    def encode(number: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = model.words.encode(captions[number * PART : (number + 1) * PART], size)
        return found

    names = track(range(len(starts)), len(starts), "captions", "batches", show=progress)
    parts = [_kept(cache, f"captions-{identity}-{number:05d}", number, encode) for number in names]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
