"""NPR-DPM (Eq. 16): the second moment of what the network's own prediction leaves, optimal for the mean it has."""

from __future__ import annotations

from typing import final

from optcov.covariances.base import Covariance, Example, Regression, rows
from optcov.gaussian import CovarianceShape, Diagonal, Full, per_sample
from optcov.prediction import Prediction


@final
class Residual(Covariance):
    """v = k g, g = E[(eps - eps_hat)^2 | x_t]."""

    name = "npr"
    head = "npr"
    unit = "velocity"
    rows = rows("NPR")

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Diagonal(prediction.head_in_clean_units("npr"))

    @classmethod
    def regression(cls, example: Example, unit: str) -> Regression:
        """Squares of the residual (Eq. 15)."""
        return Regression.plain(example.residual(unit).square())


@final
class FullResidual(Covariance):
    """Its matrix form: k E[(eps - eps_hat)(eps - eps_hat)^T]."""

    name = "npr_full"
    head = "npr_full"
    structure = "matrix"

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        matrix = prediction.heads["npr_full"]
        return Full(per_sample(prediction.factor(prediction.units.get("npr_full", "noise")), matrix) * matrix)
