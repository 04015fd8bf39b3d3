"""Gaussians whose covariance is isotropic, diagonal or full, with exact KL, density and entropy."""

from optcov.gaussian.batch import per_sample, sum_pixels, weighted_sum
from optcov.gaussian.covariance import ClampCounts, Covariance, Diagonal, Full, Isotropic
from optcov.gaussian.density import LOG_2_PI, Gaussian, kl_divergence, ratio_excess

__all__ = [
    "LOG_2_PI",
    "ClampCounts",
    "Covariance",
    "Diagonal",
    "Full",
    "Gaussian",
    "Isotropic",
    "kl_divergence",
    "per_sample",
    "ratio_excess",
    "sum_pixels",
    "weighted_sum",
]
