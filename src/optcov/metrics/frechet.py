"""The Frechet distance between two Gaussians fitted to features, with its error and its limit of many samples.

    d^2 = |a - b|^2 + tr A + tr B - 2 sum of the singular values of Q^T R,    Q Q^T = A,  R R^T = B

with means a, b and covariances A, B. The singular values are the square roots of the eigenvalues of A B. Computed as
singular values they are never complex and keep all digits; the root of a small eigenvalue would lose half of them.
Eigenvalues of A and B that are 0 up to rounding count as 0. Otherwise a singular covariance would add the root of a
rounding error. If there are fewer samples than features, the centred samples are used as the root Q or R.

The distance of n samples exceeds the distance of infinitely many by about c/n. Put the samples in G groups, and let d_g
be the distance without group g. The jackknife gives both

    standard error   sqrt((G - 1) / G  sum (d_g - mean d_g)^2)
    limit            G d - (G - 1) mean d_g           the line through n and n (G - 1)/G in 1/n, at 1/n = 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeGuard, final

import torch
from torch import Tensor

from optcov.metrics.statistics import FeatureStatistics, MetricError, check_definite, check_same_dimension, merge_all

GROUPS = 20
LEAST_IMAGES = 4  # two groups of two

Features = Tensor | FeatureStatistics  # (n, d), or what is left of them


@final
@dataclass(frozen=True)
class Distance:
    """A measured distance. A field is None if it cannot be known, because only statistics were given."""

    value: float  # with the samples at hand
    standard_error: float | None
    limit: float | None  # extrapolated to infinitely many samples of each side that was given as features
    counts: tuple[int | None, int | None]
    replicates: tuple[tuple[float, ...], tuple[float, ...]]  # without each group of either side; empty for statistics


@final
@dataclass(frozen=True)
class _Gaussian:
    """A mean (d,), and a root Q (d, k) of the covariance: Q Q^T is the covariance."""

    mean: Tensor
    root: Tensor

    @staticmethod
    def of(known: Features) -> _Gaussian:
        """Of statistics, or of rows (n, d)."""
        if isinstance(known, FeatureStatistics):
            return _Gaussian(known.mean, _root(known.covariance))
        rows = known.detach().to("cpu", torch.float64)
        mean = rows.mean(0)
        return _Gaussian(mean, (rows - mean).T / math.sqrt(len(rows) - 1))

    def distance(self, other: _Gaussian) -> float:
        """Squared Frechet distance, never negative."""
        traces = self.root.square().sum() + other.root.square().sum()
        roots = torch.linalg.svdvals(self.root.T @ other.root).sum()
        return max(0.0, float((self.mean - other.mean).square().sum() + traces - 2 * roots))


def frechet_distance(first: FeatureStatistics, second: FeatureStatistics) -> float:
    """Squared Frechet distance of two Gaussians; it is never negative."""
    _check(first, second)
    return _Gaussian.of(first).distance(_Gaussian.of(second))


def measure_frechet(first: Features, second: Features, groups: int = GROUPS, mix: bool = True) -> Distance:
    """Frechet distance of features (n, d), or of statistics. Error and limit come from the features.

    A side that is given as features is resampled. A side that is given as statistics counts as exact.
    mix: True deals the rows to the groups at random, so that an order by class does not matter. The order depends on
    the number of rows alone. False deals them in turn.
    """
    sides = [mixed(side) if mix and isinstance(side, Tensor) else side for side in (first, second)]
    parts = [_groups(side, groups) for side in sides]
    whole = [merge_all(part) for part in parts]
    _check(*whole)
    known = [_Gaussian.of(side if _few(side) else merged) for side, merged in zip(sides, whole, strict=True)]
    value = known[0].distance(known[1])
    first_without, second_without = (
        tuple(rest.distance(other) for rest in _without_each(side, part)) if len(part) > 1 else ()
        for side, part, other in zip(sides, parts, reversed(known), strict=True)
    )
    counts, replicates = (whole[0].count, whole[1].count), (first_without, second_without)
    if not any(replicates):
        return Distance(value, None, None, counts, replicates)
    bias = sum((len(part) - 1) * (sum(part) / len(part) - value) for part in replicates if part)
    return Distance(value, jackknife_error(replicates), value - bias, counts, replicates)


def mixed(rows: Tensor) -> Tensor:
    """The rows in a random order that depends on their number alone."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(rows.device)]


def jackknife_error(replicates: Sequence[Sequence[float]]) -> float:
    """Standard error from values computed without each group. Pass differences to get the error of a difference."""
    return math.sqrt(sum(_jackknife_variance(part) for part in replicates if part))


def _check(first: FeatureStatistics, second: FeatureStatistics) -> None:
    """Refuse what has no distance."""
    check_same_dimension(first.dimension, second.dimension)
    if 1 in (first.count, second.count):
        raise MetricError("one image has no covariance, and so no Frechet distance; use more")


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


def _few(side: Features) -> TypeGuard[Tensor]:
    """Whether there are no more samples than features."""
    return isinstance(side, Tensor) and len(side) <= side.shape[1]


def _without_each(side: Features, parts: Sequence[FeatureStatistics]) -> Iterator[_Gaussian]:
    """The side without each of its parts in turn: of its rows if they are few, or merged once before and behind it."""
    if _few(side):
        group = torch.arange(len(side), device=side.device) % len(parts)
        yield from (_Gaussian.of(side[group != number]) for number in range(len(parts)))
        return
    before = list(accumulate(parts[:-1], FeatureStatistics.merge))
    behind = list(accumulate(reversed(parts[1:]), FeatureStatistics.merge))[::-1]
    middle = [left.merge(right) for left, right in zip(before[:-1], behind[1:], strict=True)]
    yield from map(_Gaussian.of, (behind[0], *middle, before[-1]))


def _jackknife_variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return (len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values)
