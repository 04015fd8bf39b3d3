"""The kernel distance (KID): the maximum mean discrepancy of features under a cubic kernel, k(a, b) = (a b / d + 1)^3.

    mean of k(x, x') over pairs of different rows + the same of y - 2 mean of k(x, y)

It is unbiased, so it needs no limit of many samples. `measure_kernel` uses all pairs. It sums the kernel over pairs of
groups. These sums give the distance without any one group, and so the jackknife's standard error, as for the Frechet
distance. `kernel_distance` is torchmetrics' mean over random subsets, as papers report it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from optcov.metrics.frechet import GROUPS, Distance, Features, jackknife_error, mixed
from optcov.metrics.statistics import MetricError


@final
@dataclass(frozen=True)
class KernelDistance:
    """Mean over subsets, and their spread. The spread is that of one subset, not the error of the mean.

    The spread is None if every subset holds all images of a side, because then it says nothing.
    """

    value: float
    spread: float | None
    subsets: int
    subset_size: int


class _Features(nn.Module):
    """Features are at hand already: pass them through."""

    def __init__(self, dimension: int):
        super().__init__()
        self.num_features = dimension

    def forward(self, features: Tensor) -> Tensor:
        return features


def kernel_distance(
    first: Tensor, second: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KernelDistance:
    """Kernel distance of features (n, d) and (m, d), in float64."""
    from torchmetrics.image.kid import KernelInceptionDistance

    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise MetricError(f"features must be (n, d) and (m, d), got {tuple(first.shape)} and {tuple(second.shape)}")
    size = min(subset_size, len(first), len(second))
    if size < 2:
        raise MetricError("a kernel distance needs at least 2 images on each side")
    if not bool(first.isfinite().all() and second.isfinite().all()):
        raise MetricError("features hold NaN or infinity; check the images and the feature extractor")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Metric `Kernel Inception Distance` will save all"
        )  # they are in memory anyway
        metric = KernelInceptionDistance(_Features(first.shape[1]), subsets=subsets, subset_size=size)
    metric.update(first.double(), real=True)
    metric.update(second.double(), real=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mean, spread = metric.compute()
    known = size < min(len(first), len(second))
    return KernelDistance(float(mean), float(spread) if known else None, subsets, size)


@final
@dataclass(frozen=True)
class KernelSide:
    """One side of a kernel distance.

    The sums over pairs of its own rows are computed once, and used for many other sides.
    """

    rows: Tensor  # float64, (n, d)
    groups: int

    @staticmethod
    def of(rows: Tensor, groups: int = GROUPS, mix: bool = True) -> KernelSide:
        """Deal rows (n, d) to groups.

        mix: True deals them at random, in an order that depends on their number alone. False deals them in turn.
        """
        if rows.ndim != 2 or len(rows) < 4:
            raise MetricError(f"a kernel distance needs features (n, d) of at least 4 images, got {tuple(rows.shape)}")
        if not bool(rows.isfinite().all()):
            raise MetricError("features hold NaN or infinity; check the images and the feature extractor")
        values = rows.detach().to("cpu", torch.float64)
        return KernelSide(mixed(values) if mix else values, max(2, min(groups, len(rows) // 2)))

    @cached_property
    def inner(self) -> Tensor:
        """Sums of the kernel over pairs of different rows, by their groups, (groups, groups)."""
        own = (self.rows.square().sum(1) / self.rows.shape[1] + 1) ** 3
        sums = self.against(self)
        for group in range(self.groups):
            sums[group, group] -= own[group :: self.groups].sum()
        return sums

    @cached_property
    def sizes(self) -> Tensor:
        """The number of rows in each group, (groups,)."""
        return torch.arange(len(self.rows)).remainder(self.groups).bincount().double()

    def against(self, other: KernelSide) -> Tensor:
        """Sums of the kernel over all pairs of a row of this side and a row of the other, by their groups."""
        labels = torch.arange(len(other.rows)).remainder(other.groups)
        found = []
        for group in range(self.groups):
            kernel = (self.rows[group :: self.groups] @ other.rows.T / self.rows.shape[1] + 1) ** 3
            found.append(torch.zeros(other.groups, dtype=torch.float64).index_add_(0, labels, kernel.sum(0)))
        return torch.stack(found)


def measure_kernel(first: Tensor | KernelSide, second: Tensor | KernelSide, mix: bool = True) -> Distance:
    """Unbiased kernel distance of features (n, d) and (m, d), with its standard error. It is its own limit.

    If both sides have the same distribution, it scatters about 0, and may be negative.
    """
    sides = [side if isinstance(side, KernelSide) else KernelSide.of(side, mix=mix) for side in (first, second)]
    one, other = sides
    if one.rows.shape[1] != other.rows.shape[1]:
        shapes = [tuple(side.rows.shape) for side in sides]
        raise MetricError(f"features must be (n, d) and (m, d), got {shapes[0]} and {shapes[1]}")
    across = one.against(other)
    value = _mean_within(one) + _mean_within(other) - 2 * _mean_across(across, one, other)
    without = (
        tuple(
            _mean_within(one, g) + _mean_within(other) - 2 * _mean_across(across, one, other, g)
            for g in range(one.groups)
        ),
        tuple(
            _mean_within(one) + _mean_within(other, g) - 2 * _mean_across(across.T, other, one, g)
            for g in range(other.groups)
        ),
    )
    return Distance(value, jackknife_error(without), value, (len(one.rows), len(other.rows)), without)


def rows_of(side: Features) -> Tensor | None:
    """The features of a side; for statistics, the features that were kept with them. None if none were kept."""
    return side if isinstance(side, Tensor) else side.rows


def _mean_within(side: KernelSide, left_out: int | None = None) -> float:
    """Over pairs of different rows of one side, without one group of it."""
    total, count = side.inner.sum(), float(len(side.rows))
    if left_out is not None:
        total = total - side.inner[left_out].sum() - side.inner[:, left_out].sum() + side.inner[left_out, left_out]
        count -= float(side.sizes[left_out])
    return float(total) / (count * (count - 1))


def _mean_across(sums: Tensor, one: KernelSide, other: KernelSide, left_out: int | None = None) -> float:
    """Over pairs of a row of one side and one of the other, without one group of the first."""
    total, count = sums.sum(), float(len(one.rows))
    if left_out is not None:
        total, count = total - sums[left_out].sum(), count - float(one.sizes[left_out])
    return float(total) / (count * len(other.rows))
