"""The covariance designs: each turns a network's prediction into a second moment v of x_0 given x_t.

    design              v                                   paper
    beta-tilde          0                                   DDPM ("small"), and plain DDIM
    beta                beta_bar                            DDPM ("large"), eta = 1 only
    analytic            k (1 - Gamma_t)                     Eq. 8
    npr_isotropic       k E mean((eps - eps_hat)^2)         Eq. 16 averaged over pixels and images
    sn                  k (h - eps_hat^2)                   Eq. 10
    npr                 k g                                 Eq. 16
    sn_full, npr_full   their matrix forms                  Appendix B
    range               not of this form                    Improved DDPM

with k = beta_bar_t / alpha_bar_t. The reverse step is then lambda^2 I + gamma^2 v for all but the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess, range_ends
from optcov.gaussian import ClampCounts, Covariance, Diagonal, Full, Isotropic, per_sample
from optcov.prediction import NoisePrediction
from optcov.schedule import Schedule, Time

PerTime = Tensor | Callable[[Time], Tensor]  # a tensor of length N + 1 indexed by time, or a function of time


class CovarianceDesign(ABC):
    """What the reverse step asks: the covariance of x_s given x_t, and that of x_0 given x_t where there is one."""

    def check(self, forward: ForwardProcess) -> None:
        """Raise a ValueError if the design does not go with this forward process."""
        return

    @abstractmethod
    def clean_covariance(
        self, prediction: NoisePrediction, schedule: Schedule, t: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        """Covariance of x_0 given x_t, with every variance in [0, upper], and how many had to be moved there."""

    @abstractmethod
    def step_covariance(
        self, prediction: NoisePrediction, forward: ForwardProcess, t: Time, s: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        """Covariance of x_s given x_t, and how many variances of x_0 had to be clamped on the way."""


class Estimator(CovarianceDesign):
    """A design that estimates a second moment v of x_0 given x_t; to write a new one, define `second_moment`."""

    @abstractmethod
    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        """Estimate v, not yet clamped."""

    def clean_covariance(
        self, prediction: NoisePrediction, schedule: Schedule, t: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        return self.second_moment(prediction, schedule, t).clamped(upper)

    def step_covariance(
        self, prediction: NoisePrediction, forward: ForwardProcess, t: Time, s: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        bridge = forward.bridge(t, s)
        covariance, counts = self.clean_covariance(prediction, forward.schedule, t, upper)
        return covariance.scaled(bridge.clean_weight.square()).plus_isotropic(bridge.variance), counts


class HandcraftedVariance(Estimator):
    """A variance that is chosen, not estimated, so no data range bounds it."""

    @abstractmethod
    def variance(self, schedule: Schedule, t: Time) -> Tensor:
        """The chosen variance of x_0, () or (B,)."""

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        return Isotropic(self.variance(schedule, t))

    def clean_covariance(
        self, prediction: NoisePrediction, schedule: Schedule, t: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        return self.second_moment(prediction, schedule, t), None


@final
class BetaTilde(HandcraftedVariance):
    """DDPM's small variance, and plain DDIM: the data is a point."""

    def variance(self, schedule: Schedule, t: Time) -> Tensor:
        return torch.zeros_like(schedule.beta_bar(t))


@final
class Beta(HandcraftedVariance):
    """DDPM's large variance: the data is a unit Gaussian."""

    def check(self, forward: ForwardProcess) -> None:
        if forward.eta != 1:
            raise ValueError(
                f'covariance "beta" is defined for DDPM\'s forward process only (eta = 1), got eta = {forward.eta}; '
                f'use eta=1, or "beta_tilde"'
            )

    def variance(self, schedule: Schedule, t: Time) -> Tensor:
        return schedule.beta_bar(t)


@final
class Analytic(Estimator):
    """Analytic-DPM (Eq. 8): one number per time, Gamma_t = E mean(eps_hat^2)."""

    def __init__(self, mean_square_noise: PerTime):
        self.mean_square_noise = _as_per_time(mean_square_noise)

    def check(self, forward: ForwardProcess) -> None:
        _check_per_time(self.mean_square_noise, forward.schedule, "mean_square_noise")

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        v = noise_to_signal(schedule, t) * (1 - _at(self.mean_square_noise, schedule, t))
        return Isotropic(v)


@final
class IsotropicResidual(Estimator):
    """Analytic-DPM corrected for the imperfect mean: one number per time, E mean((eps - eps_hat)^2)."""

    def __init__(self, mean_square_residual: PerTime):
        self.mean_square_residual = _as_per_time(mean_square_residual)

    def check(self, forward: ForwardProcess) -> None:
        _check_per_time(self.mean_square_residual, forward.schedule, "mean_square_residual")

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        v = noise_to_signal(schedule, t) * _at(self.mean_square_residual, schedule, t)
        return Isotropic(v)


@final
class SquaredNoise(Estimator):
    """SN-DPM (Eq. 10): optimal if the mean is; its error is amplified by |eps_hat + E[eps|x_t]| if not."""

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        k = per_sample(noise_to_signal(schedule, t), prediction.noise)
        return Diagonal(k * (prediction.head("sn") - prediction.noise.square()))


@final
class Residual(Estimator):
    """NPR-DPM (Eq. 16): optimal for the mean the network has."""

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        return Diagonal(per_sample(noise_to_signal(schedule, t), prediction.noise) * prediction.head("npr"))


@final
class FullSquaredNoise(Estimator):
    """SN-DPM with a full covariance: k (E[eps eps^T] - eps_hat eps_hat^T), which need not be positive definite."""

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        noise = prediction.noise.flatten(1)
        matrix = prediction.head("sn_full") - noise.unsqueeze(-1) * noise.unsqueeze(-2)
        return Full(matrix).scaled(noise_to_signal(schedule, t))


@final
class FullResidual(Estimator):
    """NPR-DPM with a full covariance: k E[(eps - eps_hat)(eps - eps_hat)^T]."""

    def second_moment(self, prediction: NoisePrediction, schedule: Schedule, t: Time) -> Covariance:
        return Full(prediction.head("npr_full")).scaled(noise_to_signal(schedule, t))


@final
class LearnedRange(CovarianceDesign):
    """Improved DDPM: log sigma^2 interpolates between log beta-tilde and log beta by the network's v in [-1, 1].

    Trained networks keep to that interval by themselves, as their authors report; what lies outside is clamped and
    counted, so that no output whatever can overflow.
    """

    def check(self, forward: ForwardProcess) -> None:
        if forward.eta != 1:
            raise ValueError(
                f'covariance "range" lies between beta-tilde and beta of DDPM\'s forward process (eta = 1), '
                f"got eta = {forward.eta}; use eta=1"
            )

    def clean_covariance(
        self, prediction: NoisePrediction, schedule: Schedule, t: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        raise ValueError(
            'covariance "range" is defined for a step from t to s and says nothing of x_0 given x_t; '
            'use "npr" or "sn" for posterior()'
        )

    def step_covariance(
        self, prediction: NoisePrediction, forward: ForwardProcess, t: Time, s: Time, upper: float | None
    ) -> tuple[Covariance, ClampCounts | None]:
        like = prediction.noise
        log_low, log_high = (per_sample(end, like) for end in range_ends(forward, t, s))
        v = prediction.head("range")
        counts = ClampCounts(below=(v < -1).sum(), above=(v > 1).sum(), total=v.numel())
        share = (v.clamp(-1, 1) + 1) / 2
        return Diagonal(torch.exp(share * log_high + (1 - share) * log_low)), counts


ESTIMATORS: dict[str, Callable[[], CovarianceDesign]] = {
    "beta_tilde": BetaTilde,
    "beta": Beta,
    "sn": SquaredNoise,
    "npr": Residual,
    "sn_full": FullSquaredNoise,
    "npr_full": FullResidual,
    "range": LearnedRange,
}


def make_estimator(
    covariance: str | CovarianceDesign,
    mean_square_noise: PerTime | None = None,
    mean_square_residual: PerTime | None = None,
) -> CovarianceDesign:
    """Look a design up by its name; analytic and npr_isotropic need their numbers per time."""
    if isinstance(covariance, CovarianceDesign):
        return covariance
    if covariance == "analytic":
        return Analytic(_require(mean_square_noise, covariance, "mean_square_noise"))
    if covariance == "npr_isotropic":
        return IsotropicResidual(_require(mean_square_residual, covariance, "mean_square_residual"))
    if covariance not in ESTIMATORS:
        known = ", ".join(sorted([*ESTIMATORS, "analytic", "npr_isotropic"]))
        raise ValueError(f"unknown covariance {covariance!r}; choose one of {known}, or pass an estimator object")
    return ESTIMATORS[covariance]()


def noise_to_signal(schedule: Schedule, t: Time) -> Tensor:
    """beta_bar_t / alpha_bar_t, () or (B,): turns a second moment of the noise into one of x_0."""
    return torch.exp(-schedule.log_snr(t))


def _at(numbers: PerTime, schedule: Schedule, t: Time) -> Tensor:
    """Look numbers per time up at t, as float64, () or (B,)."""
    if isinstance(numbers, Tensor):
        return numbers.to("cpu", torch.float64)[schedule.check_times(t)]
    values = torch.as_tensor(numbers(t), dtype=torch.float64, device="cpu")
    if not bool(values.isfinite().all()):
        raise ValueError(f"the number per time at t = {t} is not finite; measure it again")
    return values


def _as_per_time(numbers: PerTime) -> PerTime:
    return numbers if callable(numbers) else torch.as_tensor(numbers, dtype=torch.float64)


def _check_per_time(numbers: PerTime, schedule: Schedule, name: str) -> None:
    if not isinstance(numbers, Tensor):
        return
    if schedule.steps is None:
        raise ValueError(f"{name} is a tensor, but this schedule has real times; pass a callable of t instead")
    if numbers.shape != (schedule.steps + 1,):
        raise ValueError(
            f"{name} has shape {tuple(numbers.shape)}, but the schedule has times 0..{schedule.steps}; "
            f"pass {schedule.steps + 1} numbers (the one at time 0 is not used)"
        )
    bad = ~numbers[1:].isfinite()
    if bool(bad.any()):
        raise ValueError(f"{name} is not finite at time {int(bad.nonzero()[0]) + 1}; measure it again")


def _require(numbers: PerTime | None, covariance: str, name: str) -> PerTime:
    if numbers is None:
        raise ValueError(
            f"covariance {covariance!r} needs one number per time: pass {name}=, a tensor of length N + 1 "
            f"or a callable of t"
        )
    return numbers
