"""The discretised Gaussian: the probability that a Gaussian gives to the bin of an 8-bit value.

Bins are centred on the 256 values, with half-width (b - a) / 2 / 255 for data in (a, b); the first and the last are
open. The exact logarithm works in the tail that the bin lies in, so that it is finite and precise however far away the
mean is. "tanh" is the authors' approximation of the normal CDF with probabilities floored at 1e-12, which is kept to
reproduce published numbers: it flatters a model that is overconfident.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from optcov.gaussian import LOG_2_PI

CDFS: Final = ("exact", "tanh")
PROBABILITY_FLOOR = 1e-12  # of the "tanh" approximation
_END = 1e-3  # a value nearer than this to an end, in half-widths of the range, belongs to the open bin
_TINY = 1e-300
_FAR = 35.0  # standard deviations beyond which erfc comes close to underflow in float64


def bin_half_width(data_range: tuple[float, float]) -> float:
    """Half the width of a bin of 8-bit data."""
    return (data_range[1] - data_range[0]) / 2 / 255


def discretised_log_prob(
    x: Tensor, mean: Tensor, variance: Tensor, data_range: tuple[float, float] = (-1, 1), cdf: str = "exact"
) -> Tensor:
    """Log-probability of each bin, in nats, elementwise; variance broadcasts. Computed in float64."""
    check_cdf(cdf)
    low, high = data_range
    end = _END * (high - low) / 2
    std = variance.double().sqrt()
    residual = (x.double() - mean.double()) / std
    half = bin_half_width(data_range) / std
    first, last = x < low + end, x > high - end
    if cdf == "tanh":
        upper = _tanh_cdf(residual + half).masked_fill(last, 1.0)
        lower = _tanh_cdf(residual - half).masked_fill(first, 0.0)
        return (upper - lower).clamp(min=PROBABILITY_FLOOR).log()
    return _log_interval(
        (residual - half).masked_fill_(first, -math.inf), (residual + half).masked_fill_(last, math.inf)
    )


def check_cdf(cdf: str) -> str:
    """Return the name, or raise a ValueError that lists the known ones."""
    if cdf not in CDFS:
        raise ValueError(f"unknown cdf {cdf!r}; choose one of {', '.join(CDFS)}")
    return cdf


def _log_interval(lower: Tensor, upper: Tensor) -> Tensor:
    """log(Phi(upper) - Phi(lower)) for lower < upper, either of which may be infinite."""
    near = torch.maximum(lower, -upper)  # by symmetry: the interval as seen from the side it lies on,
    far = torch.maximum(upper, -lower)  # so that |near| <= far
    root = math.sqrt(0.5)
    near_tail = torch.erfc(near.abs().clamp_(max=_FAR).mul_(root))
    far_tail = torch.erfc(far.clamp(max=_FAR).mul_(root))
    # With 0 inside the interval, what lies outside is the small number; otherwise the interval itself is.
    outside = (near_tail + far_tail).mul_(-0.5)
    within = near_tail.sub_(far_tail).mul_(0.5).clamp_(min=_TINY)  # the clamp meets only what is replaced below
    log_probability = torch.where(near < 0, outside.log1p_(), within.log_())
    distant = (near > _FAR - 1).flatten().nonzero().squeeze(1)
    if len(distant):
        log_probability.view(-1)[distant] = _log_far_interval(near.flatten()[distant], far.flatten()[distant])
    return log_probability


def _log_far_interval(near: Tensor, far: Tensor) -> Tensor:
    """The same for 34 < near < far, with the density at near taken out of the logarithm."""
    exponent = (near - far).mul_(near + far).mul_(0.5).clamp_(min=-700.0)  # log-ratio of the densities at far and near
    log_tail = _mills_ratio(near).sub_(exponent.exp_().mul_(_mills_ratio(far))).log_()
    return log_tail.sub_(near.square_().add_(LOG_2_PI).mul_(0.5))


def _mills_ratio(z: Tensor) -> Tensor:
    """(1 - Phi(z)) / density, by its asymptotic series, which is exact to 1e-12 for z > 34; 0 at infinity."""
    inverse = z.reciprocal()
    q = inverse.square()
    series = (-7 * q).add_(1)
    for coefficient in (-5, -3, -1):
        series.mul_(q).mul_(coefficient).add_(1)
    return series.mul_(inverse)


def _tanh_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
