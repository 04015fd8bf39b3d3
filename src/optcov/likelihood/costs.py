"""The table of costs from one sweep: F[s, t] for every covariance, and all scores that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from optcov.covariances import Covariance, OneNumber, PerTime
from optcov.forward import ForwardProcess
from optcov.likelihood.elbo import check_ends_at_final_time
from optcov.likelihood.priced import MEASURED
from optcov.likelihood.profile import Nodes, Steps, column_costs, isotropic_costs, node_count
from optcov.likelihood.statistics import Estimate, estimate, paired_difference
from optcov.likelihood.terms import check_last_variance
from optcov.schedule import Schedule, Time
from optcov.trajectory import Trajectory

Costs = np.ndarray[Any, np.dtype[np.float64]]


@final
class TimeGrid:
    """The times of a sweep, ascending up to the final one, and the steps between them."""

    def __init__(self, forward: ForwardProcess, times: Sequence[float]):
        self.forward = forward
        self.times = Trajectory(times).times  # checks the order
        check_ends_at_final_time(Trajectory(times), forward.schedule)
        self.tensor = forward.schedule.check_times(torch.tensor(self.times, dtype=torch.float64))
        self._place = {t: i for i, t in enumerate(self.times)}
        self._latest: tuple[int, Steps] | None = None

    def __len__(self) -> int:
        return len(self.times)

    def steps(self, i: int) -> Steps:
        """The steps from the i-th time to all earlier ones."""
        if self._latest is None or self._latest[0] != i:
            self._latest = (i, Steps.between(self.forward, self.times[i], self.tensor[:i]))
        return self._latest[1]

    @cached_property
    def nodes(self) -> int:
        """Interpolation nodes for all columns."""
        return node_count(self.steps(i) for i in range(len(self)))

    def place(self, t: float) -> int:
        """The position of a time; the error names the grid."""
        if t not in self._place:
            raise ValueError(
                f"time {t} is not among the {len(self)} times of this table; sweep a grid that contains it"
            )
        return self._place[t]


@final
@dataclass(frozen=True)
class CostTable:
    """The costs of all steps between the times of a grid, by covariance, in nats, averaged over images.

    Images are kept apart in G groups, so that scores and their paired differences have standard errors.
    """

    grid: TimeGrid
    data_range: tuple[float, float] | None
    covariances: tuple[str, ...]
    dimensions: int  # pixels times channels
    sums: Mapping[str, Tensor]  # additive over images; see Sweep
    given: Mapping[str, Tensor]  # variance of x_0 at each time for covariances that need no image to know it, (T,)

    @property
    def images(self) -> Tensor:
        """The number of images in each group, (G,)."""
        return self.sums["images"]

    def costs(self, covariance: str, last_variance: str = "paper") -> Costs:
        """F[s, t] in nats per image; infinite where there is no such step.

        For a discrete schedule the shape is (N + 1, N + 1), even if only some times were swept. For real times it is (T
        + 1, T + 1), indexed by position on the grid.
        """
        compact = self.grid_costs(covariance, last_variance)
        schedule = self.grid.forward.schedule
        N = schedule.grid_size
        if not schedule.discrete or len(self.grid) == N:
            return compact
        whole = np.full((N + 1, N + 1), np.inf)
        places = np.array([0, *(int(t) for t in self.grid.times)])
        whole[np.ix_(places, places)] = compact
        return whole

    def grid_costs(self, covariance: str, last_variance: str = "paper") -> Costs:
        """F[s, t] by position on the grid, (T + 1, T + 1). Position 0 is time 0."""
        T = len(self.grid)
        table = np.full((T + 1, T + 1), np.inf)
        table[0, 1:] = (self._last(covariance, last_variance).sum(1) / self.images.sum()).numpy()
        for i in range(1, T):
            steps = self.grid.steps(i)
            table[1 : i + 1, i + 1] = (self._column(covariance, i, steps, pooled=True) / self.images.sum()).numpy()
        return table

    def optimal_all(self, covariance: str, K_max: int, last_variance: str = "paper") -> dict[int, Trajectory]:
        """The best trajectory of every length 1..K_max on this grid."""
        found = Trajectory.optimal_all(self.grid_costs(covariance, last_variance), K_max)
        return {K: Trajectory([self.grid.times[int(i) - 1] for i in path.times]) for K, path in found.items()}

    def group_bits_per_dim(self, covariance: str, trajectory: Trajectory, last_variance: str = "paper") -> Tensor:
        """-ELBO in bits/dim of each group of images, (G,)."""
        return self.to_bits_per_dim(self.group_terms(covariance, trajectory, last_variance))

    def to_bits_per_dim(self, terms: Tensor) -> Tensor:
        """-ELBO in bits/dim of each group, (G,). terms: all terms except the prior, (K, G), in nats."""
        return (self.sums["prior"] + terms.sum(0)) / self.images / (self.dimensions * math.log(2))

    def group_terms(self, covariance: str, trajectory: Trajectory, last_variance: str = "paper") -> Tensor:
        """Reconstruction, then transitions by ascending s, summed over the images of each group: (K, G), in nats."""
        check_ends_at_final_time(trajectory, self.grid.forward.schedule)
        places = [self.grid.place(t) for t in trajectory.times]
        terms = [self._last(covariance, last_variance)[places[0]]]
        for s, t in pairwise(places):
            steps = self.grid.steps(t)
            step = Steps(steps.log_ratio[s : s + 1], steps.clipping[s : s + 1])
            terms.append(self._column(covariance, t, step, pooled=False).squeeze(-1))
        return torch.stack(terms)

    def score(self, covariance: str, trajectory: Trajectory, last_variance: str = "paper") -> Estimate:
        """-ELBO in bits/dim. Its standard error comes from the groups."""
        return estimate(self.group_bits_per_dim(covariance, trajectory, last_variance), self.images)

    def difference(
        self,
        covariance: str,
        trajectory: Trajectory,
        other_covariance: str,
        other_trajectory: Trajectory | None = None,
        last_variance: str = "paper",
    ) -> Estimate:
        """The bits/dim of a covariance minus those of another, on the same images and noise."""
        ours = self.group_bits_per_dim(covariance, trajectory, last_variance)
        theirs = self.group_bits_per_dim(other_covariance, other_trajectory or trajectory, last_variance)
        return paired_difference(ours, theirs, self.images)

    @property
    def prior(self) -> float:
        """KL(q(x_T | x_0) || p(x_T)) in nats per image."""
        return float(self.sums["prior"].sum() / self.images.sum())

    @property
    def mean_square_noise(self) -> PerTime:
        """Gamma_t = E mean(eps_hat^2), measured by the sweep; the covariance "analytic" uses it."""
        return self._per_time("noise_square")

    @property
    def mean_square_residual(self) -> PerTime:
        """E mean((eps - eps_hat)^2), measured by the sweep; the covariance "npr_isotropic" uses it."""
        return self._per_time("residual_square")

    def clamp_rates(self) -> dict[str, tuple[float, float]]:
        """Two shares of pixels by covariance with a head: negative variances, and variances too large for the data."""
        rates = {}
        for name in self.covariances:
            if f"clamps/{name}" in self.sums:
                below, above, total = self.sums[f"clamps/{name}"].tolist()
                rates[name] = (below / max(total, 1), above / max(total, 1))
        return rates

    def isotropic_variance(self, covariance: str) -> Tensor | None:
        """The variance of x_0 at each time, (T,), for a covariance with one number per time; None for others."""
        return self.given.get(covariance, self._measured_variances.get(covariance))

    @cached_property
    def _measured_variances(self) -> dict[str, Tensor]:
        ratio = torch.exp(-self.grid.forward.schedule.log_snr(self.grid.tensor))
        upper = None if self.data_range is None else ((self.data_range[1] - self.data_range[0]) / 2) ** 2
        kinds = [
            kind for kind in map(Covariance.registry.get, self.covariances) if kind and issubclass(kind, OneNumber)
        ]
        found = {
            kind.name: ratio * kind.variance_of_noise(self._measured(MEASURED[kind.number]))
            for kind in kinds
            if kind.number in MEASURED
        }
        if bool(ratio[-1].isinf()):  # no signal is left there: as at the last swept time with signal
            found = {name: torch.cat([v[:-1], v[-2:-1]]) for name, v in found.items()}
        return {name: v.clamp(0.0, upper) for name, v in found.items()}

    def _column(self, covariance: str, i: int, steps: Steps, pooled: bool) -> Tensor:
        """Costs of steps from the i-th time, summed over images: (S,) over all groups, or (G, S)."""
        self._require(covariance)
        variance = self.isotropic_variance(covariance)
        errors = self.sums["errors"][i]  # (E, G)
        pixels = self.images * self.dimensions
        if pooled:
            errors, pixels = errors.sum(1, keepdim=True), pixels.sum(0, keepdim=True)
        if variance is not None:
            found = isotropic_costs(variance[i], pixels, errors.T, steps)
        else:
            profile = self.sums[f"profile/{covariance}"][i]  # (1 + E, G, n)
            if pooled:
                profile = profile.sum(1, keepdim=True)
            nodes = Nodes.covering(self.grid.steps(i), self.grid.nodes)
            found = column_costs(profile[..., : len(nodes.log_ratio)].transpose(0, 1), nodes, steps)
        return found[0] if pooled else found

    def _last(self, covariance: str, last_variance: str) -> Tensor:
        """The s = 0 terms, summed over images: (T, G)."""
        self._require(covariance)
        check_last_variance(last_variance)
        name = f"last/own/{covariance}" if last_variance == "own" else f"last/{last_variance}"
        if name not in self.sums:
            remedy = f"sweep with last_variances that contain {last_variance!r}"
            kind = Covariance.registry.get(covariance)
            if last_variance == "own" and kind is not None and kind.structure == "correlated":
                remedy = 'it correlates pixels, and 8-bit bins are single pixels: score it with last_variance="paper"'
            if last_variance == "own" and covariance in self._measured_variances:
                remedy = "pass its numbers per time to the sweep, which itself has them only after its last step"
            raise ValueError(f"this table has no last step {last_variance!r} of covariance {covariance!r}; {remedy}")
        return self.sums[name]

    def _require(self, covariance: str) -> None:
        if covariance not in self.covariances:
            raise ValueError(f"this table has no covariance {covariance!r}; it has {', '.join(self.covariances)}")

    def _measured(self, name: str) -> Tensor:
        return self.sums[name].sum(1) / self.images.sum()

    def _per_time(self, name: str) -> PerTime:
        values = self._measured(name)
        schedule = self.grid.forward.schedule
        if schedule.discrete and schedule.grid_size == len(self.grid):
            return torch.cat([torch.zeros(1, dtype=torch.float64), values])
        return _LookUp(self.grid, values, schedule)


@final
@dataclass(frozen=True)
class _LookUp:
    """Numbers at the times of a grid, as a function of time."""

    grid: TimeGrid
    values: Tensor  # (T,)
    schedule: Schedule

    def __call__(self, t: Time) -> Tensor:
        times = self.schedule.check_times(t)
        if times.ndim == 0:
            return self.values[self.grid.place(times.item())]
        return torch.stack([self.values[self.grid.place(value)] for value in times.tolist()])
