"""Gaussians with exact density, entropy and KL divergence, for every shape of the covariance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.gaussian.correlated import Correlated, Spectral
from optcov.gaussian.shapes import CovarianceShape, Elementwise, sum_pixels

LOG_2_PI = math.log(2 * math.pi)


@final
@dataclass(frozen=True)
class Gaussian:
    """A Gaussian for each sample of a batch."""

    mean: Tensor  # (B, *D)
    covariance: CovarianceShape

    @property
    def variance(self) -> Tensor:
        """The diagonal of the covariance, broadcastable to the mean."""
        return self.covariance.diagonal(self.mean)

    def sample(self, noise: Tensor) -> Tensor:
        """Draw with standard normal noise (B, *D); zero variance gives the mean."""
        self._check_shape(noise, "noise")
        return self.mean + self.covariance.sqrt_apply(noise)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density at x (B, *D), in nats per sample, (B,)."""
        self._check_shape(x, "x")
        self._require_density("a log-density")
        quadratic = self.covariance.inverse_quadratic(x - self.mean)
        return -0.5 * (quadratic + self.covariance.log_det(self.mean) + self._dimensions * LOG_2_PI)

    def entropy(self) -> Tensor:
        """Differential entropy in nats per sample, (B,)."""
        self._require_density("an entropy")
        return 0.5 * (self.covariance.log_det(self.mean) + self._dimensions * (1 + LOG_2_PI))

    @property
    def _dimensions(self) -> int:
        return math.prod(self.mean.shape[1:])

    def _check_shape(self, x: Tensor, name: str) -> None:
        covariance, wanted = self.covariance, self.mean.shape
        # their variances take a transform; their shape does not
        shape = covariance.over if isinstance(covariance, Correlated | Spectral) else self.variance.shape
        if shape and not (len(shape) == len(wanted) and all(n in (1, m) for n, m in zip(shape, wanted, strict=True))):
            raise ValueError(f"a covariance over {tuple(shape)} does not fit a mean of shape {tuple(wanted)}")
        if x.shape != wanted:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but the Gaussian's mean has {tuple(wanted)}")

    def _require_density(self, what: str) -> None:
        if not bool(self.covariance.log_det(self.mean).isfinite().all()):
            raise ValueError(
                f"{what} needs a positive definite covariance, but this one is singular, indefinite or not finite "
                f"(smallest variance {float(self.variance.min())}); a step with zero covariance has no density"
            )


def kl_divergence(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q) in nats per sample, (B,), exact for every pair of covariance shapes.

    If both shapes correlate pixels, this builds a matrix over all pixels, unless both are spectral in the same basis.
    """
    q._check_shape(p.mean, "the mean of p")
    p._require_density("a KL divergence")
    q._require_density("a KL divergence")
    quadratic = q.covariance.inverse_quadratic(p.mean - q.mean)
    if isinstance(p.covariance, Elementwise) and isinstance(q.covariance, Elementwise):
        return 0.5 * (sum_pixels(ratio_excess(p.variance, q.variance).expand_as(p.mean)) + quadratic)
    log_dets = q.covariance.log_det(q.mean) - p.covariance.log_det(p.mean)
    return 0.5 * (_trace_of_ratio(p, q) - p._dimensions + log_dets + quadratic)


def _trace_of_ratio(p: Gaussian, q: Gaussian) -> Tensor:
    """tr(Q^-1 P) per sample, (B,)."""
    of_p, of_q = p.covariance, q.covariance
    if isinstance(of_q, Elementwise):
        return sum_pixels((p.variance / q.variance).expand_as(p.mean))
    if isinstance(of_p, Elementwise):
        return sum_pixels((p.variance * of_q.inverse_diagonal(q.mean)).expand_as(p.mean))
    if isinstance(of_p, Spectral) and isinstance(of_q, Spectral) and of_p.basis is of_q.basis:
        return sum_pixels((of_p.power.to(p.mean) / of_q.power.to(p.mean)).expand_as(p.mean))
    ratio: Tensor = torch.linalg.solve(of_q.dense(q.mean), of_p.dense(p.mean))
    return ratio.diagonal(dim1=-2, dim2=-1).sum(-1)


def ratio_excess(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Compute r - log r - 1 for r = numerator / denominator, without cancellation near r = 1."""
    excess = (numerator - denominator) / denominator
    # Far below r = 1 the excess rounds to -1, and log r is the difference of two logarithms that lie far apart.
    log_ratio = torch.where(excess > -0.5, torch.log1p(excess), numerator.log() - denominator.log())
    series = torch.zeros_like(excess)  # e^2/2 - e^3/3 + e^4/4 - ..., by Horner's rule
    for power in range(11, 1, -1):
        series = excess * series + (-1) ** power / power
    return torch.where(excess.abs() < 0.03, excess.square() * series, excess - log_ratio)
