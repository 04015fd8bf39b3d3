"""Load a bundle by name or directory, or make one from a foreign model. Errors name the file and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from optcov.bundle.bundle import Bundle
from optcov.bundle.conditions import read_empty
from optcov.bundle.config import BundleConfig
from optcov.bundle.directory import check_path
from optcov.bundle.errors import BundleError
from optcov.bundle.matched import from_file
from optcov.bundle.numbers import NumbersPerTime
from optcov.bundle.saving import (
    CONDITIONS,
    CONFIG,
    DECODER,
    HEADS,
    MATCHED,
    NUMBERS,
    PROVENANCE,
    SPECTRA,
    TRAJECTORIES,
    UNET,
)
from optcov.bundle.schedules import StoredTrajectory
from optcov.bundle.spectra import Spectra
from optcov.bundle.weights import check_images, load_decoder, load_head, load_unet, read_json
from optcov.checkpoints import ImportedModel
from optcov.checkpoints.opening import Function
from optcov.data.arrays import load_npz
from optcov.data.images import ImageSet
from optcov.networks import Backbone, Head, HeadedNetwork, fingerprint
from optcov.schedule import Schedule
from optcov.solvers import MatchedNoise
from optcov.storage import StorageError, read_tensors

Part = TypeVar("Part")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*", re.ASCII)


def load(
    source: str | Path,
    schedule: str | Mapping[str, Any] | Schedule | None = None,
    network: Callable[..., Any] | None = None,
) -> Bundle:
    """Load a bundle by the name of an embedded model, or by its directory.

    schedule: use the network at times of this schedule instead of its own, e.g. "linear" or "cosine".
    network: your own module or function that the bundle was fitted on. Pass it if the bundle does not hold its network.
    """
    bundle = _load(find_bundle(source), network)
    return bundle if schedule is None else bundle.with_schedule(schedule)


def embedded_models() -> dict[str, Path]:
    """The directories of the models that come with the package, by name."""
    models = _models()
    found = sorted(models.iterdir()) if models.is_dir() else []
    return {path.name: path for path in found if (path / CONFIG).is_file()}


def test_images(name: str) -> Tensor:
    """Held-out images of an embedded model, float32 (n, C, H, W) in [-1, 1]. Later versions of a model share them."""
    return test_set(name).x_0()


def test_set(name: str) -> ImageSet:
    """The images of `test_images` as a set, with labels."""
    path = _models() / f"{re.sub('-[0-9]+$', '', name)}-images" / "test.npz"
    if not _NAME.fullmatch(name) or not path.is_file():
        raise BundleError(f"no test images come with {name[:200]!r}; pass images of your own (--data)")
    return load_npz(path, "test")[0]


def find_bundle(source: str | Path) -> Path:
    """Resolve a name or a path to a directory. Write ./NAME for a directory that has the name of a model."""
    embedded = embedded_models()
    if isinstance(source, str) and _NAME.fullmatch(source) and source in embedded:
        return embedded[source]
    path = check_path(source)
    if not path.is_dir():
        raise BundleError(
            f"no bundle {str(source)[:200]!r}: it is neither a directory nor an embedded model "
            f"({', '.join(embedded) or 'none is installed'})"
        )
    if not (path / CONFIG).is_file():
        raise BundleError(
            f"{path} is not a bundle: it has no {CONFIG}; make one by optcov fit {path} DATA --out BUNDLE"
        )
    return path


def _models() -> Path:
    return Path(str(resources.files("optcov"))) / "models"


def _load(directory: Path, given: Callable[..., Any] | None = None) -> Bundle:
    with _naming(directory / CONFIG):
        config = BundleConfig.from_json(read_json(directory / CONFIG))

    empty = read_empty(directory / CONDITIONS, config.empty_condition)

    def check(unet: nn.Module) -> None:
        with _naming(directory / CONFIG):
            check_images(unet, config.image_shape, config.learned_range, config.classes, empty)

    unet = _given(directory, config, given) if given or config.given_network else load_unet(directory / UNET, check)
    if config.precision is not None:
        unet = unet.to(getattr(torch, config.precision))
    weights = fingerprint(unet)
    heads = {name: load_head(directory / HEADS / f"{name}.safetensors", weights) for name in config.heads}
    return Bundle(
        network=_network(unet, heads, config, empty),
        image_shape=config.image_shape,
        data_range=config.data_range,
        name=directory.resolve().name,
        numbers=_part(directory / NUMBERS, read_tensors, lambda found: _numbers(found[0], config.schedule), None),
        trajectories=_part(directory / TRAJECTORIES, read_json, _trajectories, ()),
        noise_caps=config.noise_caps,
        provenance=_part(directory / PROVENANCE, read_json, _provenance, {}),
        fingerprint=weights,
        classes=config.classes,
        decoder=load_decoder(directory / DECODER) if config.decoder else None,
        spectra=_part(directory / SPECTRA, read_tensors, lambda found: _spectra(found[0], config), None),
        matched=_part(directory / MATCHED, read_tensors, lambda found: _matched(found, config), ()),
    )


def _given(directory: Path, config: BundleConfig, given: Callable[..., Any] | None) -> nn.Module:
    """The user's own network that a bundle was fitted on, if it is that."""
    known = config.given_network
    if known is None:
        raise BundleError(f"{directory} holds its own network; leave network out")
    if given is None:
        raise BundleError(
            f"{directory} was fitted on a {known['class']} of your own, which a bundle does not hold; pass it, as "
            f"optcov.load({str(directory)!r}, network=module)"
        )
    module = given.eval() if isinstance(given, nn.Module) else Function(given)
    if fingerprint(module) != known["weights"]:
        raise BundleError(
            f"{directory} was fitted on a {known['class']} with other weights than this {type(given).__name__} has; "
            f"pass the one that it was fitted on, or fit again"
        )
    return module.requires_grad_(False)


def bundle_of(model: ImportedModel) -> Bundle:
    """Make a bundle of an imported model, with everything that its files say."""
    left_out = {"left_out": list(model.left_out)} if model.left_out else {}
    if model.image_shape is None:
        raise BundleError(f"{model.source} does not tell the shape of its data; fit it, and the data tells")
    bundle = Bundle(
        network=_network(model.unet, model.heads, model, model.empty_condition).requires_grad_(False),
        image_shape=tuple(model.image_shape),
        data_range=model.data_range,
        name=model.source,
        decoder=None if model.decoder is None else model.decoder.requires_grad_(False),
        noise_caps=model.noise_caps,
        provenance={"imported": {"source": model.source, "trajectory": "even", **left_out}},
    )
    if model.mean_square_noise is None:
        return bundle
    return bundle.with_numbers(NumbersPerTime(model.gamma_times, model.mean_square_noise))


def _network(
    unet: nn.Module,
    heads: Mapping[str, Head],
    known: BundleConfig | ImportedModel,
    empty: Mapping[str, Tensor] | None = None,
) -> HeadedNetwork:
    layer = known.layer if isinstance(known, ImportedModel) else (known.given_network or {}).get("layer")
    settings = (known.time_argument, known.parameterisation, known.learned_range, empty)
    backbone = Backbone(unet, None) if isinstance(unet, Function) else Backbone.of(unet, layer or None)
    return HeadedNetwork(backbone, known.schedule, heads, *settings).eval()


def _part(path: Path, read: Callable[[Path], Any], build: Callable[[Any], Part], missing: Part) -> Part:
    """What a file of the bundle holds, if it is there."""
    if not path.exists():
        return missing
    content = read(path)
    with _naming(path):
        return build(content)


def _numbers(tensors: Mapping[str, Tensor], schedule: Schedule) -> NumbersPerTime:
    numbers = NumbersPerTime.from_tensors(tensors)
    schedule.check_times(numbers.times)
    return numbers


def _spectra(tensors: Mapping[str, Tensor], config: BundleConfig) -> Spectra:
    return Spectra.from_tensors(tensors).check_fits(config.image_shape, config.schedule)


def _matched(found: Any, config: BundleConfig) -> tuple[MatchedNoise, ...]:
    tensors, metadata = found
    return from_file(tensors, metadata, config.image_shape)


def _trajectories(content: Any) -> tuple[StoredTrajectory, ...]:
    if not isinstance(content, list):
        raise BundleError("it is not a list of trajectories")
    schedules: dict[str, Schedule] = {}
    return tuple(StoredTrajectory.from_json(entry, schedules) for entry in content)


def _provenance(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise BundleError("it is not an object")
    return content


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name before the reason."""
    try:
        yield
    except StorageError as error:
        if str(path) in str(error):
            raise
        raise BundleError(f"{path}: {error}") from error
    except ValueError as error:
        raise BundleError(f"{path}: {error}") from error
