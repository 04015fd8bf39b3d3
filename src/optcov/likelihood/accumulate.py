"""What a sweep keeps: sums over images, by time and group of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from optcov.covariances import Bounds, Covariance
from optcov.gaussian import CovarianceShape, Gaussian, Isotropic, mean_square
from optcov.likelihood.cells import Cells, Deposit, NodeSums, RangeCells, VarianceCells
from optcov.likelihood.costs import CostTable, TimeGrid
from optcov.likelihood.priced import PricedCovariances
from optcov.likelihood.profile import Nodes
from optcov.likelihood.terms import Observation, fixed_last_variance, floored, last_step_cost
from optcov.reverse import ReverseProcess


@final
class Sums:
    """The sums of all times done so far, G groups apart. Names of the tensors:

    images, prior (G,); noise_square, residual_square (T, G); errors (T, E, G); profile/<covariance> (T, 1 + E, G, n);
    last/<variance>, last/own/<covariance> (T, G); clamps/<covariance> (3,): below, above, looked at.
    """

    def __init__(
        self,
        process: ReverseProcess,
        grid: TimeGrid,
        covariances: PricedCovariances,
        last_variances: Sequence[str],
        cdf: str,
        groups: int,
        dimensions: int,
    ):
        self.process, self.grid, self.covariances = process, grid, covariances
        self.last_variances, self.cdf = last_variances, cdf
        self.groups, self.dimensions = groups, dimensions
        self.finished = 0
        self.error_terms = 3 if process.keeps_raw_noise else 1
        T, G = len(grid), groups
        shapes: dict[str, tuple[int, ...]] = {
            "images": (G,),
            "prior": (G,),
            "noise_square": (T, G),
            "residual_square": (T, G),
            "errors": (T, self.error_terms, G),
        }
        for name in covariances.per_pixel:
            shapes[f"profile/{name}"] = (T, 1 + self.error_terms, G, grid.nodes)
            shapes[f"clamps/{name}"] = (3,)
        shapes |= dict.fromkeys(self.last_names, (T, G))
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._given = {name: torch.zeros(T, dtype=torch.float64) for name in covariances.given_isotropic}

    @property
    def last_names(self) -> list[str]:
        """Conventions of the last step that are kept."""
        fixed = [f"last/{name}" for name in self.last_variances if name != "own"]
        known = [*self.covariances.per_pixel, *self.covariances.given_isotropic] if "own" in self.last_variances else []
        if self.process.data_range is not None:  # bins are single pixels
            known = [name for name in known if name not in self.covariances.correlated]
        return fixed + [f"last/own/{name}" for name in known]

    def add_images(self, prior: Tensor, group: Tensor) -> None:
        """Count images (B,) with their prior terms."""
        self._sums["images"] += torch.bincount(group.cpu(), minlength=self.groups)
        self._sums["prior"] += torch.bincount(group.cpu(), prior.cpu(), self.groups)

    def finish(self, i: int, column: TimeColumn) -> None:
        """Turn a column whose images are all in into its entries of the table."""
        for name, values in column.by_group.items():
            self._sums[name][i] = values.cpu()
        nodes = Nodes.covering(self.grid.steps(i), self.grid.nodes)
        for name, deposit in column.deposits.items():
            if len(nodes.log_ratio):
                self._sums[f"profile/{name}"][i, :, :, : len(nodes.log_ratio)] = deposit.profile(nodes)
        for name, counts in column.clamps.items():
            self._sums[f"clamps/{name}"] += counts.cpu()
        for name, variance in column.given.items():
            self._given[name][i] = variance
        self.finished = i + 1

    def tensors(self) -> dict[str, Tensor]:
        """Everything, for a file."""
        return {**self._sums, **{f"given/{name}": value for name, value in self._given.items()}}

    def restore(self, tensors: Mapping[str, Tensor], finished: int) -> None:
        """Take what a file holds."""
        for name, value in self.tensors().items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise ValueError(f"the state of this sweep lacks {name!r} of shape {tuple(value.shape)}; start it anew")
            if not bool(tensors[name].isfinite().all()):
                raise ValueError(f"the state of this sweep has NaN or infinity in {name!r}; remove it to start anew")
            value.copy_(tensors[name])
        self.finished = finished

    def table(self) -> CostTable:
        """The table of costs."""
        return CostTable(
            self.grid,
            self.process.data_range,
            self.covariances.names,
            self.dimensions,
            dict(self._sums),
            dict(self._given),
        )


@final
class TimeColumn:
    """Sums of one time while its images stream through."""

    def __init__(self, sums: Sums, i: int):
        self._sums, self._t = sums, sums.grid.times[i]
        self.given: dict[str, Tensor] = {}
        self.clamps = {name: torch.zeros(3, dtype=torch.float64) for name in sums.covariances.per_pixel}
        self.by_group: dict[str, Tensor] = {}
        self.deposits: dict[str, Deposit | NodeSums] = {}
        self._steps = sums.grid.steps(i)
        self._nodes = Nodes.covering(self._steps, sums.grid.nodes)

    def add(self, seen: Observation, noise: Tensor, group: Tensor) -> None:
        """Add a batch: what the network says of it, its noise (B, *D), and the group of each image (B,)."""
        process, covariances = self._sums.process, self._sums.covariances
        mean = process.bounds.clip(seen.prediction.clean)
        errors = self._errors(seen, mean)
        self._add("errors", torch.stack([error.flatten(1).sum(1) for error in errors]), group)
        self._add("noise_square", mean_square(seen.prediction.noise), group)
        self._add("residual_square", mean_square(noise - seen.prediction.noise), group)
        for name in self._sums.last_variances:
            if name != "own":
                variance = Isotropic(fixed_last_variance(process.forward, seen.t, name))
                self._add_last(f"last/{name}", seen, mean, variance, group)
        for name, covariance in covariances.per_pixel.items():
            statistic, own = self._statistic(name, covariance, seen)
            if statistic is None:
                self._add_at_nodes(name, own, seen, mean, group)
            else:
                self._deposit(name, statistic, errors, group)
            self._add_last(f"last/own/{name}", seen, mean, own, group)
        for name, covariance in covariances.given_isotropic.items():
            known = covariance.posterior(seen.prediction, self._bounds()).covariance
            self.given[name] = known.diagonal(mean)
            self._add_last(f"last/own/{name}", seen, mean, known, group)

    def _errors(self, seen: Observation, mean: Tensor) -> list[Tensor]:
        """Squared errors of the mean, and their companions where a clipped x_0 meets raw noise: each (B, *D)."""
        difference = seen.x_0 - mean
        if self._sums.error_terms == 1:
            return [difference.square_()]
        clipped_off = seen.prediction.clean - mean
        return [difference.square(), difference * clipped_off, clipped_off.square()]

    def _statistic(self, name: str, covariance: Covariance, seen: Observation) -> tuple[Tensor | None, CovarianceShape]:
        """A covariance's statistic u of each pixel, (B, *D), if that is enough, and its covariance of the last step."""
        prediction, bounds = seen.prediction, self._bounds()
        posterior = covariance.posterior(prediction, bounds)
        statistic: Tensor | None
        if covariance.structure == "range":
            bridge = self._sums.process.forward.bridge(seen.t, 0)
            own = covariance.step(prediction, posterior, bridge, prediction.x_t).covariance
            statistic = (prediction.heads["range"].clamp(-1, 1) + 1) / 2
        else:
            own = posterior.covariance
            statistic = None if covariance.structure == "correlated" else own.diagonal(seen.x_0)
        self.clamps[name] += torch.tensor([bounds.below, bounds.above, bounds.total], dtype=torch.float64)
        return None if statistic is None else statistic.expand_as(seen.x_0), own

    def _add_at_nodes(self, name: str, v: CovarianceShape, seen: Observation, mean: Tensor, group: Tensor) -> None:
        """Add the costs of a covariance that correlates pixels."""
        if len(self._steps.log_ratio) == 0:
            return
        if name not in self.deposits:
            self.deposits[name] = NodeSums(self._nodes, self._sums.groups, self._sums.error_terms)
        sums = self.deposits[name]
        assert isinstance(sums, NodeSums)
        clipped_off = seen.prediction.clean - mean if self._sums.error_terms > 1 else None
        sums.add(v, seen.x_0 - mean, clipped_off, group)

    def _bounds(self) -> Bounds:
        """Those of the process, with counts of their own."""
        bounds = self._sums.process.bounds
        return Bounds(bounds.data_range, bounds.clip_mean)

    def _deposit(self, name: str, statistic: Tensor, errors: list[Tensor], group: Tensor) -> None:
        if len(self._steps.log_ratio) == 0:
            return
        if name not in self.deposits:
            process = self._sums.process
            cells: Cells = (
                RangeCells(process.forward.schedule.beta_bar(self._t))
                if self._sums.covariances.per_pixel[name].structure == "range"
                else VarianceCells(self._steps, process.bounds.largest_variance)
            )
            self.deposits[name] = Deposit(cells, self._sums.groups, len(errors), statistic.device)
        deposit = self.deposits[name]
        assert isinstance(deposit, Deposit)
        deposit.add(statistic, errors, group)

    def _add_last(self, name: str, seen: Observation, mean: Tensor, covariance: CovarianceShape, group: Tensor) -> None:
        if name in self._sums.last_names:
            process = self._sums.process
            if name.startswith("last/own/"):
                covariance = floored(covariance, mean, process.data_range)
            step = Gaussian(process.bounds.clip_last(mean), covariance)
            self._add(name, last_step_cost(seen.x_0, step, process.data_range, self._sums.cdf), group)

    def _add(self, name: str, values: Tensor, group: Tensor) -> None:
        """Add values (..., B) to the sums (..., G) of the images' groups."""
        if name not in self.by_group:
            self.by_group[name] = values.new_zeros(*values.shape[:-1], self._sums.groups)
        self.by_group[name].index_add_(-1, group, values)
