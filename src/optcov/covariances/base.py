"""A covariance: turns the network's prediction into the Gaussian over x_0 given x_t, and describes itself.

Its class says what the rest of the package needs to know: its name, what it needs, which eta it allows, what its head
is fitted on, and its rows in METHODS. To add one, subclass `Covariance` with a `name`. This registers it, and it can be
found by name everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from optcov.forward import Bridge, ForwardProcess
from optcov.gaussian import ClampCounts, CovarianceShape, Gaussian, per_sample
from optcov.prediction import Network, Prediction
from optcov.schedule import Schedule, Time

PerTime = Tensor | Callable[[Time], Tensor]  # a tensor of length N + 1 indexed by time, or a function of time


@final
@dataclass(frozen=True)
class BothUnits:
    """A number per time in noise units, and the variance of the velocity that belongs to it.

    Covariances take the number in noise units. Where no signal is left, noise units say nothing of x_0. There the
    variance of the velocity is used, which stays finite.
    """

    noise: PerTime
    velocity: PerTime

    def __call__(self, t: Time) -> Tensor:
        """The number in noise units."""
        return number_at(self.noise, t)


@final
@dataclass(frozen=True)
class Row:
    """One row of METHODS that steps by a covariance."""

    name: str
    eta: float = 1.0
    continuous: bool = False
    noise_cap: float | None = None  # the paper's y, in 8-bit levels


def rows(letter: str, noise_cap: float = 1.0) -> tuple[Row, ...]:
    """The three rows of an estimated covariance: LETTER-DDPM, LETTER-DDIM and LETTER-DPM."""
    return (
        Row(f"{letter}-DDPM", 1.0, noise_cap=noise_cap),
        Row(f"{letter}-DDIM", 0.0, noise_cap=noise_cap),
        Row(f"{letter}-DPM", 1.0, continuous=True, noise_cap=2 * noise_cap),
    )


@final
class Bounds:
    """The bounds from a data range: means inside it, variances up to the square of half its width.

    It counts how many variances it changes. clip_mean=False does not clip the mean, but still bounds the variances.
    """

    def __init__(self, data_range: tuple[float, float] | None, clip_mean: bool = True):
        if data_range is not None and not _is_range(data_range):
            raise ValueError(
                f"data_range = {data_range} is not (low, high) with low < high; pass None for unbounded data"
            )
        self.data_range = data_range
        self.clip_mean = clip_mean
        self.largest_variance = None if data_range is None else ((data_range[1] - data_range[0]) / 2) ** 2
        self.moved = ClampCounts(0, 0, 0)  # tensors, on the device until somebody asks

    def clip(self, mean: Tensor) -> Tensor:
        """Clip a mean of x_0 to the data range, unless there is no range or clip_mean is False."""
        return self.clip_last(mean) if self.clip_mean else mean

    def clip_last(self, mean: Tensor) -> Tensor:
        """Clip the mean of the last step, which is a mean of x_0, even if clip_mean is False."""
        return mean if self.data_range is None else mean.clamp(*self.data_range)

    @property
    def below(self) -> int:
        """How many variances were negative; they were set to 0."""
        return int(self.moved.below)

    @property
    def above(self) -> int:
        """How many variances were larger than the data range allows."""
        return int(self.moved.above)

    @property
    def total(self) -> int:
        """How many variances were checked."""
        return self.moved.total

    def __repr__(self) -> str:
        return f"Bounds({self.data_range}, below={self.below}, above={self.above}, total={self.total})"


@final
@dataclass(frozen=True)
class Regression:
    """A regression of y on g, with log g = offset + slope * output of the head. Weight 0 leaves a sample out."""

    target: Tensor  # y, (B, *D)
    offset: Tensor  # (B,), float64
    slope: Tensor  # (B,), float64
    weight: Tensor  # (B,), float64
    spread: Tensor | None = None  # A, (B, *D), if the target's variance is A g + 2 g^2 instead of 2 g^2

    @staticmethod
    def plain(target: Tensor, spread: Tensor | None = None) -> Regression:
        """The regression with log g = output, for every sample."""
        zero = torch.zeros(len(target), dtype=torch.float64)
        return Regression(target, zero, zero + 1, zero + 1, spread)

    def part(self, index: Tensor) -> Regression:
        """The regression of the samples with these numbers."""
        per_pixel = index.to(self.target.device)
        spread = None if self.spread is None else self.spread[per_pixel]
        offset, slope, weight = (values[index.to(values.device)] for values in (self.offset, self.slope, self.weight))
        return Regression(self.target[per_pixel], offset, slope, weight, spread)

    def deviance(self, log_g: Tensor) -> Tensor:
        """-2 log quasi-likelihood of each pixel, up to a constant, (B, *D): y / g + log g where A = 0."""
        if self.spread is None:
            return self.target * torch.exp(-log_g) + log_g
        g, A = log_g.exp(), self.spread.clamp(min=1e-12)
        return (A + 2 * g).log() + 2 * self.target / A * torch.log1p(A / (2 * g))

    def score(self, log_g: Tensor) -> Tensor:
        """Minus the derivative of the deviance by log g, (B, *D): (y - g) / g where A = 0."""
        if self.spread is None:
            return self.target * torch.exp(-log_g) - 1
        g = log_g.exp()
        return 2 * (self.target - g) / (self.spread + 2 * g)

    def information(self, log_g: Tensor) -> Tensor | None:
        """Expected curvature of the deviance by log g, (B, *D), in (0, 1]; None where it is 1."""
        return None if self.spread is None else 2 / (2 + self.spread * torch.exp(-log_g))

    def log_estimate(self, output: Tensor) -> Tensor:
        """log g, (B, *D). output: the logarithm of a positive head's output, or the output of a linear head."""
        return per_sample(self.offset, output) + per_sample(self.slope, output) * output


@final
@dataclass(frozen=True)
class Example:
    """Data with known noise, and the network's prediction: all that the target of a head may use."""

    prediction: Prediction
    x_0: Tensor  # (B, *D)
    noise: Tensor  # (B, *D)
    times: Tensor  # (B,)
    forward: ForwardProcess
    probe: Tensor | None = None  # z * (J^T z) for random signs z and J = d x0_hat / d x_t, (B, *D)

    @property
    def log_snr(self) -> Tensor:
        """The log-SNR of each sample, (B,), float32."""
        return self.forward.schedule.log_snr(self.times).to(self.x_0.device, torch.float32)

    def residual(self, unit: str) -> Tensor:
        """The unit's quantity minus its prediction, (B, *D)."""
        return self.quantity(unit) - self.prediction.in_unit(unit)

    def quantity(self, unit: str) -> Tensor:
        """The true value of the unit's quantity, (B, *D)."""
        return self.prediction.in_unit(unit, self.x_0, self.noise)


class Covariance(ABC):
    """A second moment v of x_0 given x_t, and what the rest of the package needs to know about it."""

    name: ClassVar[str]
    label: ClassVar[str] = ""  # in tables, if no row is its own; the name unless told
    head: ClassVar[str | None] = None  # the head that it reads
    number: ClassVar[str | None] = None  # the number per time that it takes, an argument of ReverseProcess
    spectrum: ClassVar[str | None] = None  # the powers per time and frequency that it takes, by their name in a bundle
    structure: ClassVar[str] = "diagonal"  # of v: isotropic, diagonal, correlated or matrix; "range": of the step
    has_posterior: ClassVar[bool] = True  # whether it says something of x_0 given x_t
    only_eta: ClassVar[float | None] = None  # the one eta it is defined for
    bounded: ClassVar[bool] = True  # whether a data range bounds it: not if it is chosen rather than estimated
    target_can_be_negative: ClassVar[bool] = False
    target_spread_known: ClassVar[bool] = False  # whether its regression says how: then a positive head can be fitted
    needs_probe: ClassVar[bool] = False  # whether its regression asks for a probe of the Jacobian
    unit: ClassVar[str] = "noise"  # of the heads that are fitted for it, see optcov.prediction
    about: ClassVar[str] = "zero"  # what moment a timed head estimates: about "zero", or less the squared "prediction"
    rows: ClassVar[tuple[Row, ...]] = ()
    registry: ClassVar[dict[str, type[Covariance]]] = {}

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if (cls.step is Covariance.step) != cls.has_posterior:
            raise ValueError(
                f"{cls.__name__} needs a posterior, which the bridge carries to x_s, or a step of its own with "
                f"has_posterior = False: one of the two"
            )
        if "name" in cls.__dict__:
            known = cls.registry.setdefault(cls.name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(
                    f"the name {cls.name!r} belongs to {known.__module__}.{known.__qualname__}; "
                    f"give {cls.__name__} another"
                )
            cls.registry[cls.name] = cls  # also where a notebook's cell defines it again

    @classmethod
    def row_at(cls, eta: float) -> str:
        """The name in tables: its row in discrete time at this eta, or else its label or its name."""
        return next((row.name for row in cls.rows if row.eta == eta and not row.continuous), cls.label or cls.name)

    def bound_to(self, forward: ForwardProcess) -> Covariance:
        """The covariance for this forward process; a ValueError if they do not fit together."""
        if self.only_eta is not None and forward.eta != self.only_eta:
            raise ValueError(
                f'covariance "{self.name}" is defined for eta = {self.only_eta:g} only, got eta = {forward.eta}; '
                f'use eta={self.only_eta:g}, or a covariance for any eta such as "beta_tilde"'
            )
        return self

    def asking(
        self, network: Network, forward: ForwardProcess, seed: int | None = None, indices: Sequence[int] | None = None
    ) -> Network:
        """The network that this covariance calls: the same one, unless it needs more than the heads, such as probes.

        seed, indices: of the images that are drawn, for a covariance that draws random numbers.
        """
        return network

    @abstractmethod
    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        """v, before it is bounded."""

    def posterior(self, prediction: Prediction, bounds: Bounds) -> Gaussian:
        """The Gaussian over x_0 given x_t, with its mean in the data range and its variances inside the bounds."""
        v, mean = self.second_moment(prediction), prediction.clean
        if bounds.data_range is not None and bounds.clip_mean:
            mean = mean.clamp(*bounds.data_range)
        if self.bounded:
            v, counts = v.clamped(bounds.largest_variance)
            bounds.moved = bounds.moved + counts
        return Gaussian(mean, v)

    def step(self, prediction: Prediction, posterior: Gaussian, bridge: Bridge, anchor: Tensor) -> Gaussian:
        """The Gaussian over x_s given x_t, for a covariance without a posterior. All others use the bridge."""
        raise NotImplementedError

    @classmethod
    def regression(cls, example: Example, unit: str) -> Regression:
        """The regression that the covariance's head is fitted by."""
        raise ValueError(f"covariance {cls.name!r} reads no head, so that there is nothing to fit")

    @classmethod
    def excess_regression(cls, example: Example, unit: str) -> Regression:
        """The regression of a head that estimates the moment about the prediction."""
        raise ValueError(f"covariance {cls.name!r} has no head about the prediction")


def _is_range(data_range: Any) -> bool:
    """Whether it is (low, high) with low < high."""
    try:
        low, high = (float(end) for end in data_range)
    except (TypeError, ValueError):
        return False
    return -math.inf < low < high < math.inf


def check_numbers(numbers: PerTime, schedule: Schedule, name: str) -> None:
    """Refuse numbers per time that do not fit the schedule."""
    if not isinstance(numbers, Tensor):
        return
    if not schedule.discrete:
        raise ValueError(f"{name} is a tensor, but this schedule has real times; pass a callable of t instead")
    if numbers.shape != (schedule.grid_size + 1,):
        raise ValueError(
            f"{name} has shape {tuple(numbers.shape)}, but the schedule has times 0..{schedule.grid_size}; "
            f"pass {schedule.grid_size + 1} numbers (the one at time 0 is not used)"
        )
    bad = ~numbers[1:].isfinite()
    if bool(bad.any()):
        raise ValueError(f"{name} is not finite at time {int(bad.nonzero()[0]) + 1}; measure it again")


def number_at(numbers: PerTime, t: Time) -> Tensor:
    """The numbers per time at t, float64, () or (B,)."""
    if isinstance(numbers, Tensor):
        return numbers[torch.as_tensor(t).long().cpu()]
    try:
        values = torch.as_tensor(numbers(t), dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise ValueError(f"the number per time at t = {t} is no number ({error}); return one per time") from error
    if not bool(values.isfinite().all()):
        raise ValueError(f"the number per time at t = {t} is not finite; measure it again")
    return values
