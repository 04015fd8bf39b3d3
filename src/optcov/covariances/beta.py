"""DDPM's two variances: chosen, not estimated, so no data range bounds them."""

from __future__ import annotations

from typing import final

import torch

from optcov.covariances.base import Covariance, Row
from optcov.gaussian import CovarianceShape, Isotropic
from optcov.prediction import Prediction


@final
class BetaTilde(Covariance):
    """DDPM's small variance, and plain DDIM: v = 0, the data is a point."""

    name = "beta_tilde"
    structure = "isotropic"
    bounded = False
    rows = (Row("DDPM, beta-tilde", 1.0), Row("DDIM", 0.0))

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Isotropic(torch.zeros((), dtype=torch.float64))


@final
class Beta(Covariance):
    """DDPM's large variance: v = beta_bar, the data is a unit Gaussian."""

    name = "beta"
    structure = "isotropic"
    bounded = False
    only_eta = 1.0
    rows = (Row("DDPM, beta", 1.0), Row("Ancestral sampling", 1.0, continuous=True))

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Isotropic(prediction.spread.square())
