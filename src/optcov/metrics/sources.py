"""What `optcov frechet` compares: images, statistics, or what a bundle draws by a method.

directory, .npz or .npy file, hf:NAME     images, as optcov.data reads them; #train or #test takes a split
.npz with mu and sigma                    statistics
BUNDLE:METHOD                             images drawn from a bundle, e.g. fashion:SN-DDIM, each class in turn
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from optcov import data
from optcov.bundle import Bundle, BundleError, Sampler, load
from optcov.bundle.conditions import labels_in_rows
from optcov.bundle.loading import find_bundle
from optcov.data.arrays import read_npz
from optcov.data.images import require_memory
from optcov.methods import METHODS, find_method
from optcov.metrics.extractors import Extractor
from optcov.metrics.frechet import LEAST_IMAGES, Features
from optcov.metrics.statistics import MetricError, check_same_features, statistics_from
from optcov.processes import this_process

Watch = Callable[[Iterable[Tensor]], Iterable[Tensor]]  # passes batches of images on, such as a progress bar


@final
@dataclass(frozen=True)
class Drawing:
    """How images are drawn from a bundle."""

    samples: int = 2000
    steps: int = 10
    seed: int = 0
    batch: int = 64
    first: int = 0  # number of the first image; two drawings are independent if they share no number


@final
@dataclass(frozen=True)
class OpenSource:
    """A source that was read and found in order; what then takes long is to draw its images and find their features."""

    features: Callable[[], Features]
    dimension: int  # of the features
    rows: bool = True  # whether features of single images are there, which statistics need not hold


def features_of(source: str, extractor: Extractor, drawing: Drawing | None = None) -> Features:
    """Features (n, d) of a source, or its statistics if it is a file of statistics."""
    return open_source(source, extractor, drawing).features()


def open_source(
    source: str, extractor: Extractor, drawing: Drawing | None = None, watch: Watch = lambda batches: batches
) -> OpenSource:
    """Read a source, which may be refused.

    watch: sees the batches that are drawn from a bundle.
    """
    bundle, method = split_method(source)
    if method is not None:
        return _open_bundle(source, load(bundle), method, extractor, drawing or Drawing(), watch)
    if source.endswith(".npz") and Path(source).is_file():
        arrays = read_npz(Path(source))
        if {"mu", "sigma"} <= set(arrays):
            statistics = statistics_from(arrays, Path(source))
            check_same_features(statistics, extractor.identity, source)
            return OpenSource(lambda: statistics, statistics.dimension, statistics.rows is not None)
    images = load_images(source, extractor)
    return OpenSource(lambda: extractor.features(images), _dimension(extractor, images.shape))


def load_images(source: str, extractor: Extractor) -> data.ImageSet:
    """Images that an extractor takes, enough for a distance; #train or #test at the end of a source is a split."""
    name, _, split = source.rpartition("#")
    images = data.load(name, split) if name and split in ("train", "test") else data.load(source, "all")
    extractor.check(images.shape, source)
    if len(images) < LEAST_IMAGES:
        raise MetricError(f"{source} has {len(images)} images, too few for a distance; use at least {LEAST_IMAGES}")
    return images


def _open_bundle(
    source: str, bundle: Bundle, method: str, extractor: Extractor, drawing: Drawing, watch: Watch
) -> OpenSource:
    extractor.check(bundle.image_shape, source)
    require_memory(drawing.samples * math.prod(bundle.image_shape), f"{drawing.samples} images of {source}")
    bundle.network.to(this_process().device)
    classes = labels_in_rows(bundle.class_numbers, drawing.first + drawing.samples)
    sampler = _sampler(bundle, method, drawing, classes)
    return OpenSource(
        lambda: extractor.features(_drawn(sampler, drawing, watch)), _dimension(extractor, bundle.image_shape)
    )


def _dimension(extractor: Extractor, shape: Sequence[int]) -> int:
    """Of the features, by those of a black image, whatever they are."""
    with torch.no_grad():
        return extractor.function(torch.zeros(1, *shape, dtype=torch.uint8)).shape[-1]


def split_method(source: str) -> tuple[str, str | None]:
    """Take BUNDLE:METHOD apart; the method is None if the source is neither a bundle's nor ends with a method."""
    bundle, colon, method = source.rpartition(":")
    known = {name.lower() for name in METHODS}
    meant = bool(colon) and (method.lower() in known or _is_bundle(bundle))
    return (bundle, find_method(method).name) if meant else (source, None)


def _is_bundle(name: str) -> bool:
    try:
        find_bundle(name)
    except BundleError:
        return False
    return True


def draw_images(
    bundle: Bundle, method: str, drawing: Drawing, condition: Mapping[str, Tensor] | None = None
) -> data.ImageSet:
    """Images drawn from a bundle along an even trajectory, with the noise cap that goes with the method.

    condition: what else the network takes by name, each a tensor with one entry per image number.
    """
    return _drawn(_sampler(bundle, method, drawing, condition), drawing)


def _sampler(bundle: Bundle, method: str, drawing: Drawing, condition: Mapping[str, Tensor] | None = None) -> Sampler:
    check_draws_images(bundle)
    return Sampler(bundle, method, drawing.steps, drawing.seed, condition=condition)


def check_draws_images(bundle: Bundle) -> None:
    """Refuse a bundle whose data are no images in [-1, 1], which 8 bits could not hold."""
    if bundle.data_range != (-1.0, 1.0):
        raise MetricError(f"{bundle.name} draws data in {bundle.data_range}; images need the range (-1, 1)")


def _drawn(sampler: Sampler, drawing: Drawing, watch: Watch = lambda batches: batches) -> data.ImageSet:
    numbers = range(drawing.first, drawing.first + drawing.samples)
    shares = (numbers[start : start + drawing.batch] for start in range(0, drawing.samples, drawing.batch))
    parts = list(watch(data.to_8bit(sampler.bundle.as_images(sampler.draw(share).x_0).cpu()) for share in shares))
    return data.ImageSet(torch.cat(parts), None, f"{sampler.bundle.name}:{sampler.method.name}")
