"""What `optcov frechet` compares: images, statistics, or what a bundle draws by a method.

directory, .npz or .npy file, hf:NAME     images, as optcov.data reads them; #train or #test takes a split
.npz with mu and sigma                    statistics
BUNDLE:METHOD                             images drawn from a bundle, e.g. fashion:SN-DDIM
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from optcov import data
from optcov.bundle import Bundle, BundleError, Sampler, load
from optcov.bundle.loading import find_bundle
from optcov.data.arrays import read_npz
from optcov.methods import METHODS, find_method
from optcov.metrics.extractors import Extractor
from optcov.metrics.statistics import FeatureStatistics, MetricError, statistics_from
from optcov.processes import this_process

Features = Tensor | FeatureStatistics  # (n, d), or what is left of them
Watch = Callable[[Iterable[Tensor]], Iterable[Tensor]]  # passes batches of images on, such as a progress bar


@final
@dataclass(frozen=True)
class Drawing:
    """How images are drawn from a bundle."""

    samples: int = 2000
    steps: int = 10
    seed: int = 0
    batch: int = 64


def features_of(source: str, extractor: Extractor, drawing: Drawing | None = None) -> Features:
    """Features (n, d) of a source, or its statistics if it is a file of statistics."""
    return open_source(source, extractor, drawing)()


def open_source(
    source: str, extractor: Extractor, drawing: Drawing | None = None, watch: Watch = lambda batches: batches
) -> Callable[[], Features]:
    """Read a source, which may be refused, and return what then takes long: to draw its images and find their features.

    watch: sees the batches that are drawn from a bundle.
    """
    bundle, method = split_method(source)
    if method is not None:
        model = load(bundle)
        extractor.check(model.image_shape, source)
        model.network.to(this_process().device)
        return lambda: extractor.features(draw_images(model, method, drawing or Drawing(), watch))
    if source.endswith(".npz") and Path(source).is_file():
        arrays = read_npz(Path(source))
        if {"mu", "sigma"} <= set(arrays):
            statistics = statistics_from(arrays, Path(source))
            return lambda: statistics
    name, _, split = source.rpartition("#")
    images = data.load(name, split) if name and split in ("train", "test") else data.load(source, "all")
    extractor.check(images.shape, source)
    return lambda: extractor.features(images)


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


def draw_images(bundle: Bundle, method: str, drawing: Drawing, watch: Watch = lambda batches: batches) -> data.ImageSet:
    """Images drawn from a bundle along an even trajectory, with the noise cap that goes with the method."""
    parts = list(watch(draw_batches(bundle, method, drawing)))
    return data.ImageSet(torch.cat(parts), None, f"{bundle.name}:{method}")


def draw_batches(bundle: Bundle, method: str, drawing: Drawing) -> Iterator[Tensor]:
    """The same, batch by batch: uint8 (B, C, H, W)."""
    if bundle.data_range != (-1.0, 1.0):
        raise MetricError(f"{bundle.name} draws data in {bundle.data_range}; images need the range (-1, 1)")
    sampler = Sampler(bundle, method, drawing.steps, drawing.seed)
    for first in range(0, drawing.samples, drawing.batch):
        indices = range(first, min(first + drawing.batch, drawing.samples))
        yield data.to_8bit(sampler.draw(indices).x_0.cpu())
