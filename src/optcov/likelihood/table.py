"""The paper's table of likelihoods (tab:bpd) from two sweeps.

Optimal trajectories (OT) are chosen on the table of training images, then both they and even ones (ET) are scored on
the table of test images: every covariance and every K, without another evaluation of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, final

import torch

from optcov.likelihood.costs import CostTable, TimeGrid
from optcov.likelihood.statistics import Estimate, estimate, paired_difference
from optcov.trajectory import Trajectory

KINDS = {"ET": "even times", "OT": "optimal times"}


@final
@dataclass(frozen=True)
class LikelihoodRow:
    """One number of the table."""

    covariance: str
    kind: str  # of its times, a key of KINDS
    K: int
    times: tuple[float, ...]
    bits_per_dim: Estimate  # of test images; the standard error is over groups of images, or over repeats
    difference: Estimate | None  # to the covariance "npr" on the same images, same kind and K
    terms: tuple[float, ...]  # nats per image: reconstruction, transitions by ascending s, prior

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"times": list(self.times), "terms": list(self.terms)}


def likelihood_table(
    train: CostTable | None, test: CostTable, lengths: Sequence[int], last_variance: str = "paper"
) -> list[LikelihoodRow]:
    """Every covariance by ET and, with a table to choose them by, OT at every K that the grid of times has room for."""
    if train is not None and train.grid.times != test.grid.times:
        raise ValueError("the two tables were swept over different times; sweep them over the same grid")
    lengths = fitting_lengths(test.grid, lengths)
    scored = {}
    for covariance in test.covariances:
        best = {} if train is None else train.optimal_all(covariance, lengths[-1], last_variance)
        kinds = ("ET",) if train is None else ("ET", "OT")
        for kind, K in ((kind, K) for kind in kinds for K in lengths):
            trajectory = best[K] if kind == "OT" else even_on_grid(test.grid, K)
            scored[covariance, kind, K] = (trajectory, test.group_terms(covariance, trajectory, last_variance))
    bits = {key: test.to_bits_per_dim(terms) for key, (_, terms) in scored.items()}
    rows = []
    for (covariance, kind, K), (trajectory, terms) in scored.items():
        reference = bits.get(("npr", kind, K))
        rows.append(
            LikelihoodRow(
                covariance=covariance,
                kind=kind,
                K=K,
                times=trajectory.times,
                bits_per_dim=estimate(bits[covariance, kind, K], test.images),
                difference=None
                if reference is None or covariance == "npr"
                else paired_difference(bits[covariance, kind, K], reference, test.images),
                terms=(*(terms.sum(1) / test.images.sum()).tolist(), test.prior),
            )
        )
    return rows


def fitting_lengths(grid: TimeGrid, lengths: Sequence[int]) -> list[int]:
    """The lengths K that a grid has room for, ascending; an error if there is none."""
    fitting = [K for K in sorted(set(lengths)) if 2 <= K <= len(grid)]
    if not fitting:
        raise ValueError(
            f"no number of steps among {sorted(set(lengths))} lies in 2..{len(grid)}, for which there are times"
        )
    return fitting


def even_on_grid(grid: TimeGrid, K: int) -> Trajectory:
    """K evenly spaced times of a grid from its first to its last; Trajectory.even if the grid has all times."""
    last = len(grid) - 1
    # places count from 1 where halves are rounded to even, as the times of Trajectory.even do
    return Trajectory([grid.times[round(1 + Fraction(i * last, K - 1)) - 1] for i in range(K)])


def pool_repeats(repeats: Sequence[Sequence[LikelihoodRow]]) -> list[LikelihoodRow]:
    """Join tables of the same rows by different seeds (tab:ll_var): the mean, and the deviation over seeds.

    The standard error becomes the standard deviation of one run, which is what the paper reports, that of differences
    too; times and terms are those of the first run.
    """
    pooled = []
    for same in zip(*repeats, strict=True):
        differences = [row.difference for row in same if row.difference is not None]
        pooled.append(
            replace(
                same[0],
                bits_per_dim=_over_seeds([row.bits_per_dim for row in same]),
                difference=_over_seeds(differences) if differences else None,
            )
        )
    return pooled


def _over_seeds(runs: Sequence[Estimate]) -> Estimate:
    values = torch.tensor([run.mean for run in runs], dtype=torch.float64)
    return Estimate(float(values.mean()), float(values.std()) if len(values) > 1 else None, len(values))
