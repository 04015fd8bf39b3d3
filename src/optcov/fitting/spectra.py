"""Spectra of residuals, measured in the pass that measures the numbers per time.

At each time the powers of a few images are summed, for each pair of channels. What a bundle stores follows from all
times together. Channels are mixed by the eigenvectors of the residual's covariance among channels, one matrix for all
times. Powers are smoothed over neighbouring frequencies and neighbouring noise levels by the kernels below. At most 32
noise levels are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from optcov.bundle import Spectra
from optcov.bundle.spectra import HIGHEST_LEVEL, banded, noise_levels, packed, unbanded
from optcov.covariances import BySpectrum, Covariance, Example
from optcov.fitting.config import TrainingError
from optcov.gaussian import PLAIN
from optcov.schedule import Schedule
from optcov.storage import StorageError, read_tensors, write_tensors

STORED_TIMES = 32
MOST_MIXED = 16  # channels: of more, each is kept apart
FREQUENCY_WIDTH = 0.1  # of the Gaussian kernel over the frequencies of an axis, in units of the frequency itself
LEVEL_WIDTH = 1.0  # of the Gaussian kernel over noise levels, in units of the spacing of 32 levels
FLOOR = 1e-6  # of a spectrum's mean: a lower power would be an accident of few images


@final
class SpectrumMeter:
    """Sums powers of residuals by time, for every covariance that a network with these heads can have a spectrum of."""

    def __init__(self, image_shape: tuple[int, ...], heads: Mapping[str, object] | None = None):
        self.image_shape = tuple(image_shape)
        self.kinds: dict[str, type[BySpectrum]] = {
            kind.spectrum: kind
            for kind in Covariance.registry.values()
            if issubclass(kind, BySpectrum) and (kind.head is None or kind.head in (heads or {}))
        }
        channels = self.image_shape[0] if len(self.image_shape) > 1 else 1
        self.mixes = 1 < channels <= MOST_MIXED
        self._means: dict[float, dict[str, Tensor]] = {}

    def sums(self, example: Example) -> dict[str, Tensor]:
        """Sums over the samples of an example, by name: powers, with those between channels if they are mixed."""
        found = {}
        for name, kind in self.kinds.items():
            y = PLAIN.transform(kind.normalised(example).double())
            product = torch.einsum("ba...,bc...->ac...", y, y) if self.mixes else y.square().sum(0, keepdim=True)
            found[name] = banded(product.cpu(), self.image_shape)
        return found

    def note(self, t: float, means: Mapping[str, Tensor], directory: Path | None = None) -> None:
        """Keep the means over the images of a time, also on disk."""
        for name, mean in means.items():
            if not bool(mean.isfinite().all()):
                raise TrainingError(
                    f"the spectrum {name!r} of the residuals at time {t} is not finite; check the heads"
                )
        self._means[t] = {name: mean.float() for name, mean in means.items()}  # as they come back from the disk
        if directory is not None:
            write_tensors(_file(directory, t), self._means[t])

    def recall(self, t: float, directory: Path | None) -> bool:
        """Whether the means of a time are at hand, or on disk."""
        if t not in self._means and directory is not None and _file(directory, t).is_file():
            tensors, _ = read_tensors(_file(directory, t))
            if set(tensors) != set(self.kinds):
                raise StorageError(f"{_file(directory, t)} holds other spectra; remove it to measure them again")
            self._means[t] = tensors
        return t in self._means

    def spectra(self, schedule: Schedule) -> Spectra:
        """What a bundle stores, from all times that were noted."""
        times = torch.tensor(sorted(self._means), dtype=torch.float64)
        levels = noise_levels(schedule, times)
        stored = _stored_times(times, levels, schedule)
        wanted = noise_levels(schedule, stored)
        means = [self._means[t] for t in times.tolist()]
        mixture = _mixture([mean["residual"] for mean in means]) if self.mixes else None
        powers = {}
        for name in self.kinds:
            power = torch.stack([_mixed(mean[name].double(), mixture) for mean in means])
            powers[name] = self._smoothed(power, name, levels, wanted)
        return Spectra(stored, powers, mixture)

    def _smoothed(self, power: Tensor, name: str, levels: Tensor, wanted: Tensor) -> Tensor:
        """Powers at the wanted noise levels, (S, *bands), from those at all levels, (T, *bands)."""
        level = unbanded(power, self.image_shape).flatten(1).mean(1)
        shape = _over_frequencies(power / level.reshape(-1, *[1] * (power.ndim - 1)))
        known = _with_signal(levels)
        width = LEVEL_WIDTH * float(known[-1] - known[0]) / (STORED_TIMES - 1)
        weights = _kernel(levels, wanted, width)
        shape = torch.einsum("st,t...->s...", weights / weights.sum(1, keepdim=True), shape)
        shape = shape.clamp(min=FLOOR)
        shape = shape / unbanded(shape, self.image_shape).flatten(1).mean(1).reshape(-1, *[1] * (shape.ndim - 1))
        if name == "residual":
            height = local_fit(levels, level.clamp(min=1e-30).log(), wanted, width, degree=1).exp()
            shape = shape * height.reshape(-1, *[1] * (shape.ndim - 1))
        return packed(shape)


def local_fit(levels: Tensor, values: Tensor, wanted: Tensor, width: float, degree: int) -> Tensor:
    """Values (T,) at the wanted levels (S,), by polynomials fitted with a Gaussian kernel's weights."""
    if len(levels) <= degree + 1 or width <= 0:
        degree = 0
    weights = _kernel(levels, wanted, width)
    offset = (levels - wanted[:, None]) / max(width, 1e-12)  # (S, T)
    columns = torch.stack([offset**power for power in range(degree + 1)], -1)  # (S, T, P)
    gram = columns.mT @ (weights.unsqueeze(-1) * columns)
    ridge = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(degree + 1, dtype=levels.dtype)
    right = columns.mT @ (weights * values).unsqueeze(-1)
    solved: Tensor = torch.linalg.solve(gram + ridge, right)
    return solved[:, 0, 0]


def _kernel(levels: Tensor, wanted: Tensor, width: float) -> Tensor:
    """Weights of the levels (T,) at the wanted ones (S,): (S, T), of which the nearest level has 1."""
    distance = (levels - wanted[:, None]).square() / max(2 * width**2, 1e-300)
    return torch.exp(-(distance - distance.amin(1, keepdim=True)))


def _over_frequencies(power: Tensor) -> Tensor:
    """Smooth (T, *bands) along its sides; the lowest frequencies, which differ most, stay apart."""
    for axis in range(1 if power.ndim == 2 else 2, power.ndim):
        n = torch.arange(power.shape[axis], dtype=power.dtype)
        weights = torch.exp(-(n - n[:, None]).square() / (2 * (FREQUENCY_WIDTH * n[:, None]).clamp(min=1e-3).square()))
        power = torch.movedim(torch.movedim(power, axis, -1) @ (weights / weights.sum(1, keepdim=True)).mT, -1, axis)
    return power


def _mixed(mean: Tensor, mixture: Tensor | None) -> Tensor:
    """Powers (C, *bands) of mixed channels, from those of their pairs (C, C, *bands); as they are without a mixture."""
    return mean[0] if mixture is None else torch.einsum("ca,ab...,cb->c...", mixture, mean, mixture)


def _mixture(means: Sequence[Tensor]) -> Tensor:
    """Rows that make channels uncorrelated on average, (C, C): of residuals (C, C, *bands) by time, each time alike."""
    among = torch.stack([mean.double().flatten(2).mean(2) for mean in means])
    total = (among / among.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]).mean(0)
    vectors: Tensor = torch.linalg.eigh((total + total.mT) / 2).eigenvectors.mT.flip(0)
    signs = torch.where(vectors.sum(1, keepdim=True) < 0, -1.0, 1.0)
    return (signs * vectors).contiguous()


def _stored_times(times: Tensor, levels: Tensor, schedule: Schedule) -> Tensor:
    if len(times) <= STORED_TIMES:
        return times
    known = _with_signal(levels)
    even = torch.linspace(float(known[0]), float(known[-1]), STORED_TIMES, dtype=torch.float64)
    chosen = schedule.nearest(schedule.time_at(-even)).double()
    chosen[0], chosen[-1] = times[0], times[-1]
    ascending: Tensor = torch.unique(chosen)
    return ascending


def _with_signal(levels: Tensor) -> Tensor:
    """Levels at which a signal is left; all, if there is none."""
    known = levels[levels < HIGHEST_LEVEL]
    return known if len(known) else levels


def _file(directory: Path, t: float) -> Path:
    return Path(directory) / "spectra" / f"{t!r}.safetensors"
