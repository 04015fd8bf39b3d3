"""SN-DPM (Eq. 10): the second moment of the noise less the square of its mean, optimal if the mean is."""

from __future__ import annotations

from typing import final

from torch import Tensor

from optcov.covariances.base import Covariance, Example, Regression, rows
from optcov.gaussian import CovarianceShape, Diagonal, Full, per_sample
from optcov.prediction import Prediction


@final
class SquaredNoise(Covariance):
    """v = k (h - eps_hat^2), h = E[eps^2 | x_t]; its error is amplified by |eps_hat + E[eps|x_t]|.

    In another unit than noise h and the prediction are of that quantity: the origin matters if the mean is imperfect.
    A head may estimate the excess h - eps_hat^2 itself: then it is positive by its form, and nothing is clamped.
    """

    name = "sn"
    head = "sn"
    unit = "velocity"
    about = "prediction"
    rows = rows("SN")

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        unit, excess = prediction.units.get("sn", "noise"), prediction.heads["sn"]
        if "sn" not in prediction.excesses:
            own = prediction if prediction.unguided is None else prediction.of_heads
            excess = excess - own.in_unit(unit).square()
        factor = prediction.factor(unit)
        return Diagonal((per_sample(factor, excess) if factor.ndim else factor) * excess)

    @classmethod
    def regression(cls, example: Example, unit: str) -> Regression:
        """Squares of the noise (Eq. 9)."""
        return Regression.plain(example.quantity(unit).square())

    @classmethod
    def excess_regression(cls, example: Example, unit: str) -> Regression:
        """y = u^2 - u_hat^2, whose mean is the variance g if the prediction u_hat is the mean of u.

        With u = u_hat + r and r of variance g, y = 2 u_hat r + r^2 has the variance 4 u_hat^2 g + 2 g^2.
        """
        square = example.prediction.in_unit(unit).square()
        return Regression.plain(example.quantity(unit).square() - square, spread=4 * square)


def squared_noise(prediction: Prediction) -> Tensor:
    """The paper's h = E[eps^2 | x_t] by the head "sn", (B, *D), whatever form and unit the head has.

    So h - eps_hat^2 is the variance of the noise, and v = k (h - eps_hat^2).
    """
    v = SquaredNoise().second_moment(prediction).diagonal(prediction.x_t)
    return v * per_sample(1 / prediction.factor("noise"), v) + prediction.of_heads.noise.square()


@final
class FullSquaredNoise(Covariance):
    """Its matrix form: k (E[eps eps^T] - eps_hat eps_hat^T), which need not be positive definite."""

    name = "sn_full"
    head = "sn_full"
    structure = "matrix"

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        unit = prediction.units.get("sn_full", "noise")
        mean = prediction.of_heads.in_unit(unit).flatten(1)
        matrix = prediction.heads["sn_full"] - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return Full(per_sample(prediction.factor(unit), matrix) * matrix)
