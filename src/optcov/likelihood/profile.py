"""The cost of all steps from one time t as a smooth function of one number per step.

With a = lambda^2 / gamma^2 of the step (t, s), the transition cost of a covariance with second moment v and squared
error e = (x_0 - x0_hat)^2, summed over pixels, is

    F[s, t] = A(a) + B(a)      A = sum 1/2 (log(1 + v/a) - v/(v + a))      B = sum 1/2 e / (v + a)

which is 1/2 (r - log r - 1) + 1/2 gamma^2 e / sigma^2 with sigma^2 = gamma^2 (a + v) and r = a / (a + v). For the
learned range with share u, sigma^2 = lambda^2 (1 + beta_bar_t / a)^u, which is a function of a as well.

So a time's whole column of costs is held by A and B at Chebyshev nodes in log a. Neither has a zero or a singularity
while |Im log a| < pi / 2, so that log A and log B converge geometrically. Sums over pixels at the nodes are additive:
over batches, groups of images and processes.

Where a clipped x0_hat is used beside the raw noise (the paper's DDIM rows), the error of the mean is
gamma (x_0 - x0_hat) + kappa sqrt(alpha_bar_t) (x0_raw - x0_hat), and B has a cross and a square term in addition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess

TOLERANCE = 1e-11  # relative, of log A and log B
_TINY = 1e-300  # keeps the logarithm of an absent term finite


@final
@dataclass(frozen=True)
class Steps:
    """All steps from one time t to the times s > 0 of a grid."""

    log_ratio: Tensor  # log a, (S,)
    clipping: Tensor  # kappa sqrt(alpha_bar_t) / gamma: weight of x0_raw - x0_hat beside x_0 - x0_hat, (S,)

    @staticmethod
    def between(forward: ForwardProcess, t: float, earlier: Tensor) -> Steps:
        """Steps from t to each of the earlier times (S,)."""
        if len(earlier) == 0:
            return Steps(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
        bridge = forward.bridge(torch.full_like(earlier, t), earlier)
        signal = forward.schedule.alpha_bar(t).sqrt()
        log_ratio = bridge.variance.log() - 2 * bridge.clean_weight.log()
        return Steps(log_ratio, bridge.noisy_weight * signal / bridge.clean_weight)


@final
@dataclass(frozen=True)
class Nodes:
    """Where a column's sums are kept: Chebyshev nodes in log a, or the steps themselves if there are few."""

    log_ratio: Tensor  # (n,)
    exact: bool

    @staticmethod
    def covering(steps: Steps, count: int) -> Nodes:
        """At most `count` nodes for the steps."""
        if len(steps.log_ratio) <= count:
            return Nodes(steps.log_ratio, exact=True)
        low, high = steps.log_ratio.min(), steps.log_ratio.max()
        angle = torch.arange(count, dtype=torch.float64) * (math.pi / (count - 1))
        return Nodes((low + high) / 2 + (high - low) / 2 * torch.cos(angle), exact=False)

    def interpolate(self, values: Tensor, log_ratio: Tensor) -> Tensor:
        """Values at log_ratio (S,), (..., S), from those at the nodes (..., n), by the barycentric formula."""
        if self.exact:
            return values[..., (self.log_ratio[None, :] == log_ratio[:, None]).double().argmax(1)]
        weights = torch.ones_like(self.log_ratio)
        weights[1::2] = -1
        weights[[0, -1]] /= 2
        distance = log_ratio - self.log_ratio[:, None]
        distance.masked_fill_(distance == 0, 1e-200)  # on a node its own term outweighs all others
        basis = distance.reciprocal_().mul_(weights[:, None])
        return values @ basis / basis.sum(0)


def node_count(columns: Iterable[Steps]) -> int:
    """Nodes that bring the interpolation error of the widest column below the tolerance."""
    width, most = 0.0, 0
    for column in columns:
        most = max(most, len(column.log_ratio))
        if len(column.log_ratio) > 1:
            width = max(width, float(column.log_ratio.max() - column.log_ratio.min()))
    if width == 0:
        return most
    growth = math.asinh(math.pi / width)  # log of the size of the Bernstein ellipse in |Im log a| < pi / 2
    return min(most, math.ceil(-math.log(TOLERANCE) / growth) + 8)


def column_costs(sums: Tensor, nodes: Nodes, steps: Steps) -> Tensor:
    """F[s, t] for each of the steps, (..., S), from sums at the nodes (..., 1 + E, n): A, then the E parts of B."""
    if len(steps.log_ratio) == 0:
        return sums.new_zeros(*sums.shape[:-2], 0)
    a_part, error_part = sums[..., 0, :].clamp(min=_TINY), sums[..., 1, :].clamp(min=_TINY)
    at_nodes = [a_part.log(), error_part.log()]
    if sums.shape[-2] == 4:
        at_nodes += [sums[..., 2, :] / error_part, sums[..., 3, :] / error_part]
    at_steps = nodes.interpolate(torch.stack(at_nodes), steps.log_ratio)
    shape_term, error_term = at_steps[0].exp(), at_steps[1].exp()
    if len(at_nodes) == 4:
        error_term = error_term * (1 + steps.clipping * (2 * at_steps[2] + steps.clipping * at_steps[3]))
    return shape_term + error_term


def isotropic_costs(variance: Tensor, dimensions: Tensor, errors: Tensor, steps: Steps) -> Tensor:
    """F[s, t] for each of the steps, (..., S), for one variance v, ().

    dimensions: number of pixels of all images, (...,). errors: (..., E), sums of e, and of the cross and square term.
    """
    ratio = steps.log_ratio.exp()
    excess = variance / ratio
    shape_term = log_excess(excess) / 2
    error = errors[..., :1]
    if errors.shape[-1] == 3:
        error = error + steps.clipping * (2 * errors[..., 1:2] + steps.clipping * errors[..., 2:])
    return dimensions.unsqueeze(-1) * shape_term + error / (2 * (ratio + variance))


def log_excess(q: Tensor) -> Tensor:
    """log(1 + q) - q / (1 + q) for q >= 0, without cancellation at small q."""
    small = q.square() * (1 / 2 - q * (2 / 3 - q * (3 / 4 - q * (4 / 5 - q * 5 / 6))))
    return torch.where(q < 2e-3, small, torch.log1p(q) - q / (1 + q))
