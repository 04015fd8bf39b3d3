"""The Frechet distance between two Gaussians fitted to features, with its error and its limit of many samples.

    d^2 = |a - b|^2 + tr A + tr B - 2 sum of the singular values of Q^T R,    Q Q^T = A,  R R^T = B

with means a, b and covariances A, B. The singular values are the roots of the eigenvalues of A B, so that nothing turns
complex; found as such they keep all digits, of which the root of a small eigenvalue would lose half. Eigenvalues of A
and B that are 0 up to rounding count as 0, so that singular covariances do not add the root of a rounding error.

The distance of n samples exceeds that of infinitely many by about c/n. With the samples in G groups and d_g the
distance without group g, the jackknife gives at once

    standard error   sqrt((G - 1) / G  sum (d_g - mean d_g)^2)
    limit            G d - (G - 1) mean d_g           the line through n and n (G - 1)/G in 1/n, at 1/n = 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from optcov.metrics.statistics import FeatureStatistics, MetricError, check_definite, check_same_dimension, merge_all

GROUPS = 20
LEAST_IMAGES = 4  # two groups of two

Features = Tensor | FeatureStatistics  # (n, d), or what is left of them


@final
@dataclass(frozen=True)
class Distance:
    """A measured distance; what is unknown because only statistics were given is None."""

    value: float  # with the samples at hand
    standard_error: float | None
    limit: float | None  # extrapolated to infinitely many samples of each side that was given as features
    counts: tuple[int | None, int | None]
    replicates: tuple[tuple[float, ...], tuple[float, ...]]  # without each group of either side; empty for statistics


def frechet_distance(first: FeatureStatistics, second: FeatureStatistics) -> float:
    """Squared Frechet distance of two Gaussians, never negative."""
    check_same_dimension(first.dimension, second.dimension)
    if 1 in (first.count, second.count):
        raise MetricError("one image has no covariance, and so no Frechet distance; use more")
    return _distance(first, second, _root(second.covariance))


def measure_frechet(first: Features, second: Features, groups: int = GROUPS, mix: bool = True) -> Distance:
    """Frechet distance of features (n, d), or of statistics; error and limit come from the features.

    Each side that is given as features is resampled; a side given as statistics counts as exact. mix: deal the rows to
    the groups at random, the same for as many rows, so that an order by class does not matter; else in turn.
    """
    parts = [_groups(mixed(side) if mix and isinstance(side, Tensor) else side, groups) for side in (first, second)]
    whole = [merge_all(part) for part in parts]
    value = frechet_distance(*whole)
    first_without, second_without = (
        tuple(_without_each(part, whole[1 - side])) if len(part) > 1 else () for side, part in enumerate(parts)
    )
    counts, replicates = (whole[0].count, whole[1].count), (first_without, second_without)
    if not any(replicates):
        return Distance(value, None, None, counts, replicates)
    bias = sum((len(part) - 1) * (sum(part) / len(part) - value) for part in replicates if part)
    return Distance(value, jackknife_error(replicates), value - bias, counts, replicates)


def mixed(rows: Tensor) -> Tensor:
    """The rows in a random order, which depends on their number alone."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)]


def jackknife_error(replicates: Sequence[Sequence[float]]) -> float:
    """Standard error from numbers without each group, side by side; of differences, if they are differences."""
    return math.sqrt(sum(_jackknife_variance(part) for part in replicates if part))


def _distance(first: FeatureStatistics, second: FeatureStatistics, root: Tensor) -> float:
    """The distance, with root root^T the second covariance, which serves many first ones."""
    roots = torch.linalg.svdvals(_root(first.covariance).T @ root).sum()
    traces = first.covariance.trace() + second.covariance.trace()
    return max(0.0, float((first.mean - second.mean).square().sum() + traces - 2 * roots))


def _root(covariance: Tensor) -> Tensor:
    """A matrix R with R R^T = covariance; what is 0 up to rounding, or negative because of it, counts as 0."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    check_definite(values)
    floor = float(values.abs().max()) * len(values) * torch.finfo(torch.float64).eps
    root: Tensor = vectors * values.where(values > floor, 0.0).sqrt()
    return root


def _groups(side: Features, groups: int) -> list[FeatureStatistics]:
    """Statistics of every groups-th row together."""
    if isinstance(side, FeatureStatistics):
        return [side]
    if groups < 2:
        raise MetricError(f"{groups} groups cannot be resampled; use at least 2")
    groups = min(groups, len(side) // 2)
    if groups < 2:
        raise MetricError(f"{len(side)} images are too few for a distance; use at least {LEAST_IMAGES}")
    return [FeatureStatistics.of(side[start::groups]) for start in range(groups)]


def _without_each(parts: Sequence[FeatureStatistics], other: FeatureStatistics) -> list[float]:
    """Distance without each part in turn; what lies before it and behind it is merged once."""
    before = list(accumulate(parts[:-1], FeatureStatistics.merge))
    behind = list(accumulate(reversed(parts[1:]), FeatureStatistics.merge))[::-1]
    middle = [left.merge(right) for left, right in zip(before[:-1], behind[1:], strict=True)]
    root = _root(other.covariance)
    return [_distance(rest, other, root) for rest in (behind[0], *middle, before[-1])]


def _jackknife_variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return (len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values)
