"""Spectra: powers of residuals per noise level and frequency, for the covariances that correlate pixels.

They are measured at some times of the network's own schedule. A network knows noise by its level alone, so in between,
and on other schedules, the logarithm of a power is interpolated linearly in the log-SNR.

File spectra.safetensors: `times`, float64 (T,); `power/NAME`, float16, float32 or float64 (T, C, *bands), one per name;
`channels`, orthogonal (C, C), if channels are mixed. An axis of more than 64 frequencies is stored in 64 bands: single
frequencies first, then bands that widen by a constant factor; all frequencies of a band have the same power.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from optcov.bundle.errors import BundleError
from optcov.covariances import Spectrum
from optcov.gaussian import Basis
from optcov.schedule import Schedule, Time

MOST_BANDS = 64  # of an axis
MOST_TIMES = 1024
MOST_CHANNELS = 4096
HIGHEST_LEVEL = 40.0  # of noise: e^40 times the signal's power counts as no signal
PREFIX = "power/"
LEAST, MOST = 2.0**-14, 2.0**15  # between them a float16 has three digits


@final
@dataclass(frozen=True, eq=False)
class Spectra:
    """Powers at some times, in an orthonormal cosine basis over the sides of an image; data (d,) has one side.

    powers: by name, each (T, *bands) with the channels first if the data has any. "residual" is the residual itself, in
    velocity units; the others are correlations of mean 1, by the head whose variances they belong to.
    """

    times: Tensor  # of the network's own schedule, ascending, without 0, float64 (T,)
    powers: Mapping[str, Tensor]
    channels: Tensor | None = None  # orthogonal (C, C), float64; None: channels are not mixed

    def __post_init__(self) -> None:
        times = self.times
        if times.dtype != torch.float64 or times.ndim != 1 or not 0 < len(times) <= MOST_TIMES:
            raise BundleError(f"times of spectra must be float64 (T,) with T from 1 to {MOST_TIMES}")
        if not bool(times.isfinite().all()) or float(times[0]) <= 0 or bool((times.diff() <= 0).any()):
            raise BundleError("times of spectra must ascend, and start above 0")
        if not self.powers:
            raise BundleError("spectra without a power are none; measure them (optcov fit)")
        shapes = {tuple(power.shape) for power in self.powers.values()}
        if len(shapes) > 1:
            raise BundleError(f"the spectra differ in shape: {sorted(shapes)}")
        for name, power in self.powers.items():
            _check_power(name, power, len(times))
        if self.channels is not None:
            try:
                Basis(self.channels)
            except ValueError as error:
                raise BundleError(str(error)) from error

    @property
    def names(self) -> tuple[str, ...]:
        """What there are spectra of."""
        return tuple(self.powers)

    def tensors(self) -> dict[str, Tensor]:
        """Everything there is, by its name in a file."""
        mixed = {} if self.channels is None else {"channels": self.channels}
        return {"times": self.times, **{PREFIX + name: power for name, power in self.powers.items()}, **mixed}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> Spectra:
        """Build from named tensors; unknown and missing names are refused."""
        powers = {name[len(PREFIX) :]: value for name, value in tensors.items() if name.startswith(PREFIX)}
        unknown = [name for name in tensors if name not in ("times", "channels") and not name.startswith(PREFIX)]
        if "times" not in tensors or unknown or not all(name.isidentifier() for name in powers):
            named = [name[:50] for name in unknown] or [name[:50] for name in powers if not name.isidentifier()]
            raise BundleError(f"spectra lack their times or have the unknown {named}")
        return Spectra(tensors["times"], powers, tensors.get("channels"))

    def check_fits(self, image_shape: tuple[int, ...], schedule: Schedule) -> Spectra:
        """Itself; a BundleError if it is of other data, or at times that the schedule lacks."""
        wanted = band_shape(image_shape)
        found = tuple(next(iter(self.powers.values())).shape[1:])
        if found != wanted:
            raise BundleError(f"the spectra have bands {found}, but data of shape {image_shape} has {wanted}")
        if self.channels is not None and (len(image_shape) < 2 or len(self.channels) != image_shape[0]):
            raise BundleError(f"the spectra mix {len(self.channels)} channels, but the data is {image_shape}")
        schedule.check_times(self.times)
        return self

    def without(self, names: Collection[str]) -> Spectra | None:
        """The same without those of some names; None if nothing is left."""
        kept = {name: power for name, power in self.powers.items() if name not in names}
        return replace(self, powers=kept) if kept else None

    def function(self, name: str, image_shape: tuple[int, ...], native: Schedule, schedule: Schedule) -> Spectrum:
        """The powers of a name at the schedule's times; beyond the measured noise levels the nearest one counts.

        native: the schedule that `times` belong to.
        """
        if name not in self.powers:
            raise BundleError(f"there is no spectrum {name!r}; it has {', '.join(self.powers)}: fit it (optcov fit)")
        levels = noise_levels(native, self.times)  # ascending
        logs = self.powers[name].double().log()

        def at(t: Time) -> Tensor:
            wanted = noise_levels(schedule, t)
            place = torch.searchsorted(levels, wanted.reshape(-1)).clamp(1, max(1, len(levels) - 1))
            low, high = (place - 1), place.clamp(max=len(levels) - 1)
            width = (levels[high] - levels[low]).clamp(min=1e-300)
            share = ((wanted.reshape(-1) - levels[low]) / width).clamp(0.0, 1.0)
            share = share.reshape(-1, *[1] * (logs.ndim - 1))
            found = unbanded(torch.lerp(logs[low], logs[high], share).exp(), image_shape)
            return found if wanted.ndim else found[0]

        return Spectrum(at, Basis(self.channels))


def noise_levels(schedule: Schedule, t: Time) -> Tensor:
    """-log SNR, float64, () or (n,); where no signal is left, a level beyond all others."""
    return (-schedule.log_snr(t)).double().clamp(-HIGHEST_LEVEL, HIGHEST_LEVEL)


def packed(power: Tensor) -> Tensor:
    """Powers as float16 if three digits of each fit into it, else as float32."""
    small = bool((power >= LEAST).all()) and bool((power <= MOST).all())
    return power.half() if small else power.float()


def bands_of(n: int) -> Tensor:
    """The band of each of n frequencies, int64 (n,): each its own up to 64, then bands that widen."""
    if n <= MOST_BANDS:
        return torch.arange(n)
    single = MOST_BANDS // 2
    ratio = (n / single) ** (1 / (MOST_BANDS - single))
    edges = [single * ratio**i for i in range(1, MOST_BANDS - single)]
    rounded: list[int] = []
    for edge in edges:  # every band has a frequency of its own
        rounded.append(max(math.ceil(edge), (rounded[-1] if rounded else single) + 1))
    return torch.bucketize(torch.arange(n), torch.tensor([*range(1, single + 1), *rounded]), right=True)


def band_shape(image_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which spectra of data of a shape are stored."""
    first = 0 if len(image_shape) == 1 else 1
    return (*image_shape[:first], *(min(n, MOST_BANDS) for n in image_shape[first:]))


def banded(power: Tensor, image_shape: tuple[int, ...]) -> Tensor:
    """Means over the bands, (T, *bands), of powers (T, *D)."""
    for axis in _sides(image_shape):
        if power.shape[axis] > MOST_BANDS:
            band = bands_of(power.shape[axis])
            count = torch.bincount(band, minlength=MOST_BANDS).to(power)
            shape = [MOST_BANDS if i == axis else n for i, n in enumerate(power.shape)]
            total = power.new_zeros(shape).index_add(axis, band, power)
            power = total / count.reshape([-1 if i == axis else 1 for i in range(power.ndim)])
    return power


def unbanded(power: Tensor, image_shape: tuple[int, ...]) -> Tensor:
    """Powers (n, *D) of all frequencies from those of the bands (n, *bands)."""
    for axis in _sides(image_shape):
        if image_shape[axis - 1] > MOST_BANDS:
            power = power.index_select(axis, bands_of(image_shape[axis - 1]))
    return power


def _sides(image_shape: tuple[int, ...]) -> range:
    """Axes of (T, *D) that have frequencies."""
    return range(1 if len(image_shape) == 1 else 2, len(image_shape) + 1)


def _check_power(name: str, power: Tensor, times: int) -> None:
    if power.dtype not in (torch.float16, torch.float32, torch.float64) or power.ndim < 2 or len(power) != times:
        raise BundleError(
            f"the spectrum {name[:50]!r} must have one row of floating-point powers for each of {times} times, got "
            f"{power.dtype} of shape {tuple(power.shape)}"
        )
    sides = power.shape[1:] if power.ndim == 2 else power.shape[2:]
    if max(sides) > MOST_BANDS or min(power.shape) < 1 or (power.ndim > 2 and power.shape[1] > MOST_CHANNELS):
        raise BundleError(f"the spectrum {name[:50]!r} has shape {tuple(power.shape)}: more than {MOST_BANDS} bands")
    if not bool((power.isfinite() & (power > 0)).all()):
        raise BundleError(f"the spectrum {name[:50]!r} holds a power that is not positive and finite; measure it again")
