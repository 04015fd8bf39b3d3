"""Sums over pixels on a grid of the covariance's statistic, from which a time's profile of costs follows.

While images stream through, each pixel leaves its count and its error, with the first and second moment of its place
within the cell; afterwards a second-order expansion about the cells' centres gives the sums A and B of `profile` at all
nodes by one matrix product. What is left out is of third order in the width of a cell, below 1e-8 of the cost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.gaussian import CovarianceShape, sum_pixels
from optcov.likelihood.profile import Nodes, Steps, log_excess

CELLS = 4096
_NEGLIGIBLE = 1e-8  # a variance below this share of the smallest a counts as 0
_UNBOUNDED = 1e12  # largest variance told apart if no data range bounds it


@final
@dataclass(frozen=True)
class Kernel:
    """A function of a and of a cell's coordinate: its value and two derivatives at the centres, each (n, cells)."""

    value: Tensor
    slope: Tensor
    curvature: Tensor

    def total(self, moments: Tensor) -> Tensor:
        """Sum over pixels at each node, (G, n), from moments of order 0..2, (3, G, cells)."""
        kernel = torch.cat([self.value, self.slope, self.curvature / 2], 1)
        return moments.permute(1, 0, 2).flatten(1) @ kernel.T


class Cells(ABC):
    """A grid over a covariance's statistic u."""

    width: float  # of a cell, in the coordinate that the kernels are expanded in

    @abstractmethod
    def locate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Number of each pixel's cell, int32, and its place relative to the cell's centre, in widths of a cell."""

    @abstractmethod
    def kernels(self, ratio: Tensor, used: Tensor) -> tuple[Kernel, Kernel]:
        """Kernels of A and of B at each a (n,) for the cells whose numbers are used."""


@final
class VarianceCells(Cells):
    """For u = v: cell 0 for v = 0, then equal cells in log v."""

    def __init__(self, steps: Steps, upper: float | None):
        smallest = float(steps.log_ratio.min()) if len(steps.log_ratio) else 0.0
        self.high = math.log(_UNBOUNDED if upper is None else upper)
        self.low = min(smallest + math.log(_NEGLIGIBLE), self.high - 1)
        self.width = (self.high - self.low) / CELLS

    def locate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        bounded = u.clamp(math.exp(self.low - self.width / 2), math.exp(self.high))
        # cell n is centred on n; what counts as 0 lies in [0, 0.5)
        place = bounded.log_().mul_(1 / self.width).add_(0.5 - self.low / self.width)
        cell = place.round().clamp_(max=CELLS)
        return cell.int(), place.sub_(cell)

    def kernels(self, ratio: Tensor, used: Tensor) -> tuple[Kernel, Kernel]:
        v = torch.exp(self.low + (used.double() - 0.5) * self.width).where(used > 0, 0.0)
        a = ratio[:, None]
        inverse = 1 / (a + v)
        share = v * inverse  # p = v / (a + v), whose derivative by log v is p (1 - p)
        square = share.square()
        shape = Kernel(log_excess(v / a) / 2, square / 2, square * (1 - share))
        error = Kernel(inverse / 2, -share * inverse / 2, share * (2 * share - 1) * inverse / 2)
        return shape, error


@final
class RangeCells(Cells):
    """For the learned range, u = (v + 1) / 2 in [0, 1]: equal cells in u."""

    width = 1 / CELLS

    def __init__(self, beta_bar: Tensor):
        self.beta_bar = beta_bar

    def locate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        place = u * CELLS - 0.5
        cell = place.round().clamp_(0, CELLS - 1)
        return cell.int(), place.sub_(cell)

    def kernels(self, ratio: Tensor, used: Tensor) -> tuple[Kernel, Kernel]:
        u = (used.double() + 0.5) / CELLS
        span = torch.log1p(self.beta_bar.to(ratio) / ratio)[:, None]  # log beta - log beta-tilde
        decay = torch.exp(-u * span)
        shape = Kernel(_exponential_excess(u * span) / 2, span * (1 - decay) / 2, span.square() * decay / 2)
        scale = decay / (2 * ratio[:, None])
        return shape, Kernel(scale, -span * scale, span.square() * scale)


@final
class Deposit:
    """Moments of pixels by cell and group of images, for one covariance at one time."""

    def __init__(self, cells: Cells, groups: int, error_terms: int, device: torch.device):
        self.cells, self.groups = cells, groups
        self.moments = torch.zeros(3, 1 + error_terms, groups * (CELLS + 1), dtype=torch.float64, device=device)

    def add(self, u: Tensor, errors: list[Tensor], group: Tensor) -> None:
        """Add pixels: u and each error (B, *D), group (B,) the number of each image's group."""
        cell, offset = self.cells.locate(u.flatten(1))
        index = cell.add_(group[:, None].int() * (CELLS + 1)).flatten()
        offset = offset.flatten()
        square = offset.square()
        self.moments[0, 0] += torch.bincount(index, minlength=self.moments.shape[-1])
        self.moments[1, 0].index_add_(0, index, offset)
        self.moments[2, 0].index_add_(0, index, square)
        for number, error in enumerate(errors, start=1):
            error = error.flatten()
            self.moments[0, number].index_add_(0, index, error)
            self.moments[1, number].index_add_(0, index, error * offset)
            self.moments[2, number].index_add_(0, index, error * square)

    def profile(self, nodes: Nodes) -> Tensor:
        """Sums at the nodes, (1 + E, G, n): A, then the parts of B."""
        scale = self.cells.width ** torch.arange(3, dtype=torch.float64)
        moments = scale[:, None, None, None] * self.moments.reshape(3, -1, self.groups, CELLS + 1).cpu()
        used = moments[0, 0].sum(0).nonzero().squeeze(1)
        shape, error = self.cells.kernels(nodes.log_ratio.exp(), used)
        parts = [(shape if part == 0 else error).total(moments[:, part][..., used]) for part in range(moments.shape[1])]
        return torch.stack(parts)


@final
class NodeSums:
    """Costs of a covariance that correlates pixels: sums at the nodes, by group of images, (1 + E, G, n).

    Its step is gamma^2 v.affine(1, a), for v the second moment and a = lambda^2 / gamma^2 of the step: a function of a
    alone, also in the fast form of `gaussian.Correlated`. So one evaluation of the network serves every s here, too.
    The cost is computed exactly at each node in a, image by image, and interpolated between as that of all others is.
    A alone, which vanishes with v / a, would be a difference of large numbers. A + B/2 and B/2 are kept in the places
    of A and B; their logarithms are as smooth.
    """

    def __init__(self, nodes: Nodes, groups: int, error_terms: int):
        self.ratios = nodes.log_ratio.exp()
        self.sums = torch.zeros(1 + error_terms, groups, len(self.ratios), dtype=torch.float64)

    def add(self, v: CovarianceShape, difference: Tensor, clipped_off: Tensor | None, group: Tensor) -> None:
        """Add images: v, the errors x_0 - x0_hat (B, *D), what clipping took off x0_hat, and the group of each (B,)."""
        one, groups = torch.ones((), dtype=torch.float64), group.cpu()
        for number, a in enumerate(self.ratios):
            step = v.affine(one, a)
            trace = a * sum_pixels(step.inverse_diagonal(difference).expand_as(difference))
            volume = step.log_det(difference) - difference[0].numel() * math.log(float(a))
            shape = 0.5 * (trace - difference[0].numel() + volume)
            square = 0.5 * step.inverse_quadratic(difference)
            parts = [shape + square / 2, square / 2]
            if clipped_off is not None:
                other = 0.5 * step.inverse_quadratic(clipped_off)
                together = 0.5 * step.inverse_quadratic(difference + clipped_off)
                parts += [(together - square - other) / 2, other]
            for part, values in enumerate(parts):
                self.sums[part, :, number].index_add_(0, groups, values.cpu())

    def profile(self, nodes: Nodes) -> Tensor:
        """Sums at the nodes, (1 + E, G, n)."""
        assert len(nodes.log_ratio) == len(self.ratios)
        return self.sums


def _exponential_excess(z: Tensor) -> Tensor:
    """exp(-z) + z - 1 for z >= 0, without cancellation at small z."""
    small = z.square() * (1 / 2 - z * (1 / 6 - z * (1 / 24 - z * (1 / 120 - z / 720))))
    return torch.where(z < 2e-3, small, torch.expm1(-z) + z)
