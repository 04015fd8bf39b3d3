"""One number per time: Analytic-DPM, and the same corrected for the imperfect mean."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from optcov.covariances.base import Covariance, PerTime, check_numbers, number_at, rows
from optcov.forward import ForwardProcess
from optcov.gaussian import CovarianceShape, Isotropic
from optcov.prediction import Prediction


class OneNumber(Covariance):
    """An isotropic covariance by a number per time, in noise units: a tensor of length N + 1, or a callable of t."""

    structure = "isotropic"
    number: ClassVar[str]

    def __init__(self, numbers: PerTime):
        try:
            self.numbers = numbers if callable(numbers) else torch.as_tensor(numbers, dtype=torch.float64).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{self.number} = {numbers!r:.80} is neither a tensor of length N + 1 nor a callable of t"
            ) from error

    def bound_to(self, forward: ForwardProcess) -> Covariance:
        """Refuse numbers that do not fit the schedule."""
        check_numbers(self.numbers, forward.schedule, self.number)
        return super().bound_to(forward)


@final
class Analytic(OneNumber):
    """Analytic-DPM (Eq. 8): v = k (1 - Gamma_t), Gamma_t = E mean(eps_hat^2)."""

    name = "analytic"
    number = "mean_square_noise"
    rows = rows("A")

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Isotropic(prediction.factor("noise") * (1 - number_at(self.numbers, prediction.t)))


@final
class IsotropicResidual(OneNumber):
    """Analytic-DPM corrected for the imperfect mean: v = k E mean((eps - eps_hat)^2)."""

    name = "npr_isotropic"
    label = "isotropic NPR-DDPM"
    number = "mean_square_residual"

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Isotropic(prediction.factor("noise") * number_at(self.numbers, prediction.t))
