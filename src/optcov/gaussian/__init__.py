"""Gaussians of isotropic, diagonal, correlated or full covariance, with exact KL, density and entropy."""

from optcov.gaussian.basis import PLAIN, Basis, cosine_matrix
from optcov.gaussian.correlated import Correlated, Spectral
from optcov.gaussian.density import LOG_2_PI, Gaussian, kl_divergence, ratio_excess
from optcov.gaussian.shapes import (
    ClampCounts,
    CovarianceShape,
    Diagonal,
    Full,
    Isotropic,
    mean_square,
    per_sample,
    sum_pixels,
    weighted_sum,
)

__all__ = [
    "LOG_2_PI",
    "PLAIN",
    "Basis",
    "ClampCounts",
    "Correlated",
    "CovarianceShape",
    "Diagonal",
    "Full",
    "Gaussian",
    "Isotropic",
    "Spectral",
    "cosine_matrix",
    "kl_divergence",
    "mean_square",
    "per_sample",
    "ratio_excess",
    "sum_pixels",
    "weighted_sum",
]
