"""One number per time: Analytic-DPM, and the same corrected for the imperfect mean.

In noise units v = k y with k = beta_bar / alpha_bar, where y is 1 - Gamma_t or the mean square residual. Where no
signal is left (flow matching at t = 1, schedules of zero terminal SNR at N) k is infinite and y is 0. With u the
velocity, of which x_0 is linear with the slope -b / sqrt(a^2 + b^2) at every time, the same two numbers are

    E mean(u^2) - E mean(u_hat^2)      and      E mean((u - u_hat)^2),       v = b^2 / (a^2 + b^2) times either,

for E u^2 - E u_hat^2 is what 1 - Gamma_t is for the noise, whose square is 1 on average. A number that comes with its
twin in velocity units (`BothUnits`) uses it there. Without one, v is that of the last time with signal on the full
grid, which is near: by the oracle v differs by a relative alpha_bar / beta_bar times the variance of the data. A sweep
that measures the numbers itself knows them at its own times alone, and takes the last of these with signal.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor

from optcov.covariances.base import BothUnits, Covariance, PerTime, check_numbers, number_at, rows
from optcov.forward import ForwardProcess
from optcov.gaussian import CovarianceShape, Isotropic
from optcov.prediction import Prediction
from optcov.schedule import Schedule


class OneNumber(Covariance):
    """An isotropic covariance by a number per time, in noise units: a tensor of length N + 1, or a callable of t."""

    structure = "isotropic"
    number: ClassVar[str]

    def __init__(self, numbers: PerTime):
        noise, velocity = (numbers.noise, numbers.velocity) if isinstance(numbers, BothUnits) else (numbers, None)
        self.numbers = self._checked(noise)
        self.velocity = None if velocity is None else self._checked(velocity)
        self.schedule: Schedule | None = None

    def _checked(self, numbers: PerTime) -> PerTime:
        try:
            return numbers if callable(numbers) else torch.as_tensor(numbers).to("cpu", torch.float64, copy=True)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.number} = {numbers!r:.80} is neither a tensor of length N + 1 nor a callable of t"
            ) from error

    def bound_to(self, forward: ForwardProcess) -> Covariance:
        """Refuse numbers that do not fit the schedule."""
        check_numbers(self.numbers, forward.schedule, self.number)
        if self.velocity is not None:
            check_numbers(self.velocity, forward.schedule, f"{self.number} in velocity units")
        bound = copy.copy(super().bound_to(forward))
        bound.schedule = forward.schedule  # type: ignore[attr-defined]  # it is one of this class
        return bound

    @staticmethod
    @abstractmethod
    def variance_of_noise(number: Tensor) -> Tensor:
        """What the number says of the variance of the noise given x_t."""

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        blind = prediction.signal == 0
        if bool(blind.any()):
            return Isotropic(self._without_signal(prediction, blind))
        return Isotropic(prediction.factor("noise") * self.variance_of_noise(number_at(self.numbers, prediction.t)))

    def _without_signal(self, prediction: Prediction, blind: Tensor) -> Tensor:
        """v, () or (B,), where some times have no signal."""
        assert self.schedule is not None, "bound_to was not called"
        t = self.schedule.check_times(prediction.t)
        seen = torch.where(blind, torch.as_tensor(self.schedule.last_time_with_signal, dtype=t.dtype), t)
        v = torch.exp(-self.schedule.log_snr(seen)) * self.variance_of_noise(number_at(self.numbers, seen))
        if self.velocity is None:
            return v
        return torch.where(blind, prediction.factor("velocity") * number_at(self.velocity, t), v)


@final
class Analytic(OneNumber):
    """Analytic-DPM (Eq. 8): v = k (1 - Gamma_t), Gamma_t = E mean(eps_hat^2)."""

    name = "analytic"
    number = "mean_square_noise"
    rows = rows("A")

    @staticmethod
    def variance_of_noise(number: Tensor) -> Tensor:
        return 1 - number


@final
class IsotropicResidual(OneNumber):
    """Analytic-DPM corrected for the imperfect mean: v = k E mean((eps - eps_hat)^2)."""

    name = "npr_isotropic"
    label = "isotropic NPR-DDPM"
    number = "mean_square_residual"

    @staticmethod
    def variance_of_noise(number: Tensor) -> Tensor:
        return number
