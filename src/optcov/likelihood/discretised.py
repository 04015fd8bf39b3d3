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
    """Log-probability of each bin, in nats, elementwise; variance broadcasts and is positive. Computed in float64."""
    check_cdf(cdf)
    usable = (variance > 0) & (variance < torch.inf)
    if not bool(usable.all()):
        raise ValueError(f"the variance {float(variance[~usable].flatten()[0])} is not a positive, finite number")
    low, high = data_range
    end = _END * (high - low) / 2
    first, last = x < low + end, x > high - end
    std = variance.double().sqrt()
    residual = (x.double() - mean.double()).mul_(1 / std)
    half = bin_half_width(data_range) / std
    if cdf == "tanh":
        upper = _tanh_cdf(residual + half).masked_fill(last, 1.0)
        lower = _tanh_cdf(residual - half).masked_fill(first, 0.0)
        return (upper - lower).clamp(min=PROBABILITY_FLOOR).log()
    # By symmetry, a bin is an interval (near, far) as seen from the side it lies on, |near| <= far; an open one has its
    # own side, from which near is below 0 if the mean lies beyond the end.
    open_ended = first | last
    distance = residual.abs()
    if bool(open_ended.any()):
        distance = torch.where(last, residual, torch.where(first, -residual, distance))
    return _log_interval(distance.sub_(half), 2 * half, open_ended)


def check_cdf(cdf: str) -> str:
    """Return the name, or raise a ValueError that lists the known ones."""
    if cdf not in CDFS:
        raise ValueError(f"unknown cdf {cdf!r}; choose one of {', '.join(CDFS)}")
    return cdf


def _log_interval(near: Tensor, width: Tensor, open_ended: Tensor) -> Tensor:
    """log(Phi(near + width) - Phi(near)) elementwise for near >= -width / 2; what is open-ended is infinitely wide."""
    distant = near > _FAR
    share = float(torch.count_nonzero(distant)) / max(distant.numel(), 1)
    if share in (0, 1):
        return (_log_far_interval if share else _log_close_interval)(near, width, open_ended)
    # Most elements as a whole, with the others moved to where they do no harm; then the others by themselves.
    if share > 0.5:
        log_probability = _log_far_interval(near.clamp(min=_FAR), width, open_ended)
        rest, method = ~distant, _log_close_interval
    else:
        log_probability = _log_close_interval(near.clamp(max=_FAR), width, open_ended)
        rest, method = distant, _log_far_interval
    index = rest.flatten().nonzero().squeeze(1)
    widths = width if width.ndim == 0 else torch.take(width.expand_as(near), index)
    log_probability.view(-1)[index] = method(torch.take(near, index), widths, torch.take(open_ended, index))
    return log_probability


def _log_close_interval(near: Tensor, width: Tensor, open_ended: Tensor) -> Tensor:
    """For near up to 34, where the tails beyond both ends are representable numbers."""
    root = math.sqrt(0.5)
    near_tail = torch.erfc(near.abs().mul_(root))
    far_tail = (near + width).mul_(root).erfc_().masked_fill_(open_ended, 0.0)
    # With 0 inside the interval, what lies outside is the small number; otherwise the interval itself is.
    outside = (near_tail + far_tail).mul_(-0.5)
    within = near_tail.sub_(far_tail).mul_(0.5)
    return torch.where(near < 0, outside.log1p_(), within.log_())


def _log_far_interval(near: Tensor, width: Tensor, open_ended: Tensor) -> Tensor:
    """For near of 34 and more: the logarithm of the tail beyond near, less what lies beyond far where that matters."""
    log_tail = _log_far_tail(near)
    narrowest = float(width.min())
    if narrowest * (2 * _FAR + narrowest) > -2 * _NEGLIGIBLE:  # twice the log-ratio of the densities at near and far
        return log_tail
    far = (near + width).masked_fill_(open_ended, _INFINITE)
    ratio = _log_far_tail(far).sub_(log_tail).exp_()
    return log_tail.add_(ratio.neg_().log1p_())


def _log_far_tail(z: Tensor) -> Tensor:
    """log(1 - Phi(z)) by its asymptotic series, exact to 1e-11 for z > 34."""
    square = z.square()
    q = square.reciprocal()
    series = (-37 / 3 * q).add_(5 / 2).mul_(q).sub_(1).mul_(q)
    return series.sub_(square, alpha=0.5).add_(q.log_(), alpha=0.5).sub_(LOG_2_PI / 2)


def _tanh_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
