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
_FAR = 34.0  # standard deviations beyond which erfc comes close to underflow in float64
_NEGLIGIBLE = -36.0  # logarithm of a share that float64 does not see
_INFINITE = 1e100  # standard deviations that stand for infinitely many


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
    first, last = x < low + end, x > high - end
    std = variance.double().sqrt()
    residual = (x.double() - mean.double()) / std
    half = bin_half_width(data_range) / std
    if cdf == "tanh":
        upper = _tanh_cdf(residual + half).masked_fill(last, 1.0)
        lower = _tanh_cdf(residual - half).masked_fill(first, 0.0)
        return (upper - lower).clamp(min=PROBABILITY_FLOOR).log()
    # By symmetry, a bin is an interval (near, far) as seen from the side it lies on, |near| <= far.
    open_ended = first | last
    distance = residual.abs()
    if bool(open_ended.any()):
        beyond = (first & (residual > 0)) | (last & (residual < 0))  # the mean lies beyond the end: near is below 0
        distance.mul_(1 - 2 * beyond.double())
    return _log_interval(distance - half, distance.add_(half).masked_fill_(open_ended, math.inf))


def check_cdf(cdf: str) -> str:
    """Return the name, or raise a ValueError that lists the known ones."""
    if cdf not in CDFS:
        raise ValueError(f"unknown cdf {cdf!r}; choose one of {', '.join(CDFS)}")
    return cdf


def _log_interval(near: Tensor, far: Tensor) -> Tensor:
    """log(Phi(far) - Phi(near)) elementwise for |near| <= far; far may be infinite."""
    distant = near > _FAR
    share = float(distant.sum()) / max(distant.numel(), 1)
    if share in (0, 1):
        return (_log_far_interval if share else _log_close_interval)(near, far)
    # Most elements as a whole, with the others moved to where they do no harm; then the others by themselves.
    if share > 0.5:
        width = far - near
        moved = near.clamp(min=_FAR)
        log_probability = _log_far_interval(moved, width.add_(moved))
        rest, method = ~distant, _log_close_interval
    else:
        log_probability = _log_close_interval(near.clamp(max=_FAR), far)
        rest, method = distant, _log_far_interval
    index = rest.flatten().nonzero().squeeze(1)
    log_probability.view(-1)[index] = method(torch.take(near, index), torch.take(far, index))
    return log_probability


def _log_close_interval(near: Tensor, far: Tensor) -> Tensor:
    """For near up to 34, where the tails beyond both ends are representable numbers."""
    root = math.sqrt(0.5)
    near_tail, far_tail = torch.erfc(near.abs().mul_(root)), torch.erfc(far * root)
    # With 0 inside the interval, what lies outside is the small number; otherwise the interval itself is.
    outside = (near_tail + far_tail).mul_(-0.5)
    within = near_tail.sub_(far_tail).mul_(0.5)
    return torch.where(near < 0, outside.log1p_(), within.log_())


def _log_far_interval(near: Tensor, far: Tensor) -> Tensor:
    """For near above 34: the logarithm of the tail beyond near, less what lies beyond far where that matters."""
    log_tail = _log_far_tail(near)
    exponent = (near - far).mul_(near + far)  # twice the log-ratio of the densities at far and near
    if float(exponent.max()) < 2 * _NEGLIGIBLE:
        return log_tail
    ratio = _log_far_tail(far.clamp(max=_INFINITE)).sub_(log_tail).exp_()
    return log_tail.add_(ratio.neg_().log1p_())


def _log_far_tail(z: Tensor) -> Tensor:
    """log(1 - Phi(z)) by its asymptotic series, exact to 1e-11 for z > 34."""
    square = z.square()
    q = square.reciprocal()
    series = (-37 / 3 * q).add_(5 / 2).mul_(q).sub_(1).mul_(q)
    return series.sub_(square.sub_(q.log_()).add_(LOG_2_PI).mul_(0.5))


def _tanh_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
