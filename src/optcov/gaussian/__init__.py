"""Gaussians whose covariance is isotropic, diagonal or full, with exact KL, density and entropy."""

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
    "ClampCounts",
    "CovarianceShape",
    "Diagonal",
    "Full",
    "Gaussian",
    "Isotropic",
    "kl_divergence",
    "mean_square",
    "per_sample",
    "ratio_excess",
    "sum_pixels",
    "weighted_sum",
]
