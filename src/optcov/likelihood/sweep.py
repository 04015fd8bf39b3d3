"""The sweep: one network evaluation per image and time gives the cost of every step of every covariance.

While images stream through a time t, each covariance gathers sums (see `cells`). After the last image of that time, the
sums become a profile of costs of fixed size. So memory does not grow with the number of images. Everything kept is a
sum over images, so several processes can each take a share of the images and add their results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.covariances import Covariance, Ocm, PerTime, Spectrum, number_at
from optcov.identity import check_unchanged, condition_identity, digest, digest_numbers, images_identity, known_by
from optcov.likelihood.accumulate import Sums, TimeColumn
from optcov.likelihood.costs import CostTable, TimeGrid
from optcov.likelihood.discretised import check_cdf
from optcov.likelihood.priced import PricedCovariances, default_covariances
from optcov.likelihood.terms import (
    NoiseByTime,
    check_images,
    check_last_variance,
    check_stochastic,
    observe,
    prior_cost,
    seeded_noise,
)
from optcov.networks import HeadedNetwork
from optcov.networks.guidance import refuse_guided
from optcov.prediction import Source, check_condition, condition_of, take
from optcov.processes import this_process
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule
from optcov.storage import StorageError, read_tensors, write_tensors


@final
@dataclass(frozen=True)
class SweepProgress:
    """The state of a sweep after a batch."""

    done: int  # batches, over all times
    total: int


@final
class Sweep:
    """An iterator over the batches of a sweep; `table` exists after the last batch.

    See `cost_table` for the arguments. With a state file, a stopped run resumes at the time it had reached, and a
    finished run is not repeated.
    """

    def __init__(
        self,
        process: ReverseProcess,
        images: Tensor | Source,
        covariances: Sequence[str] | Mapping[str, Covariance] | None = None,
        *,
        condition: Mapping[str, Tensor] | None = None,
        times: Sequence[float] | None = None,
        seed: int = 0,
        noise: NoiseByTime | None = None,
        last_variances: Sequence[str] = ("paper", "own"),
        cdf: str = "exact",
        mean_square_noise: PerTime | None = None,
        mean_square_residual: PerTime | None = None,
        spectra: Mapping[str, Spectrum] | None = None,
        batch_size: int = 64,
        groups: int = 8,
        shard: tuple[int, int] = (0, 1),
        device: torch.device | str | None = None,
        state: Path | None = None,
        save_every: float = 60.0,
        identity: Mapping[str, Any] | str | None = None,
    ):
        check_stochastic(process.forward)
        refuse_guided(process.given_network)
        check_cdf(cdf)
        self.last_variances = tuple(check_last_variance(name) for name in last_variances)
        self.process, self.images, self.cdf = process, images, cdf
        if condition is None:
            condition = condition_of(images, torch.arange(len(images)))
        self.condition = check_condition(condition, len(images))
        self.grid = TimeGrid(process.forward, process.forward.schedule.full_grid().tolist() if times is None else times)
        self.seed, self.noise, self.batch_size = seed, noise, _positive(batch_size, "batch_size")
        self.numbers = {"mean_square_noise": mean_square_noise, "mean_square_residual": mean_square_residual}
        self.spectra = dict(spectra or {})
        rank, world = shard
        if not 0 <= rank < world:
            raise ValueError(f"shard = {shard} is not (number, count) with 0 <= number < count")
        if len(images) < world:
            raise ValueError(f"{len(images)} images cannot be shared among {world} processes; use fewer processes")
        self.groups = min(_positive(groups, "groups"), len(images))
        self.members = torch.arange(rank, len(images), world)
        self.device, self.state, self.save_every = device, state, save_every
        self._wanted, self._identity = covariances, identity
        self._sums: Sums | None = None

    def __len__(self) -> int:
        return len(self.grid) * len(self._batches())

    @torch.no_grad()
    def __iter__(self) -> Iterator[SweepProgress]:
        saved = time.monotonic()
        per_time = len(self._batches())
        if self._sums is not None and not self._sums.finished:
            self._sums = None  # left within its first time: the images that it has counted come again
        if self._sums is None and self.state is not None and self.state.exists():
            self._sums = self._resume(self.state)
        first = 0 if self._sums is None else self._sums.finished
        for i in range(first, len(self.grid)):
            column: TimeColumn | None = None
            for number, index in enumerate(self._batches(), start=1):
                sums, column = self._visit(i, index, column)
                if number == per_time:
                    sums.finish(i, column)
                    due = time.monotonic() - saved > self.save_every or i + 1 == len(self.grid)
                    if self.state is not None and due:
                        self._save(self.state, sums)
                        saved = time.monotonic()
                yield SweepProgress(i * per_time + number, len(self))

    @property
    def table(self) -> CostTable:
        """The result; an error before the last batch is done."""
        if self._sums is None or self._sums.finished < len(self.grid):
            raise ValueError("the sweep is not finished; iterate over it to its end first")
        return self._sums.table()

    def _visit(self, i: int, index: Tensor, column: TimeColumn | None) -> tuple[Sums, TimeColumn]:
        t = self.grid.times[i]
        x_0 = self._load(index)
        if self.noise is None:
            shape = x_0.shape[1:]
            noise = seeded_noise(self.process.forward.schedule, self.seed, index.tolist(), shape, x_0.dtype)(t)
        else:
            noise = self.noise(t)[index]
        condition = {name: value.to(x_0.device) for name, value in take(self.condition, index).items()}
        seen = observe(self.process.for_images(self.seed, index.tolist()), x_0, t, noise, condition)
        if self._sums is None:
            self._sums = self._allocate(x_0[0].numel(), list(seen.prediction.heads))
        column = column or TimeColumn(self._sums, i)
        group = (index % self.groups).to(x_0.device)
        if i == 0:
            self._sums.add_images(prior_cost(self.process.forward, x_0), group)
        column.add(seen, noise.to(seen.x_0), group)
        return self._sums, column

    def _allocate(self, dimensions: int, heads: Sequence[str], names: Sequence[str] | None = None) -> Sums:
        # of a correlated covariance there are no probabilities of bins: it has no last step of its own
        bins = set(self.last_variances) == {"own"} and self.process.data_range is not None
        spectra = {} if bins and not self._wanted else self.spectra
        wanted = self._wanted or names or default_covariances(heads, self.process.forward, spectra)
        custom = wanted if isinstance(wanted, Mapping) else None
        covariances = PricedCovariances(list(wanted), self.process.forward, self.numbers, custom, self.spectra)
        return Sums(self.process, self.grid, covariances, self.last_variances, self.cdf, self.groups, dimensions)

    def _resume(self, path: Path) -> Sums:
        try:
            tensors, metadata = read_tensors(path)
        except StorageError as error:
            raise StorageError(f"{error}; remove it to start anew") from error
        try:
            found = dict(json.loads(metadata["settings"]))
            dimensions, finished = int(metadata["dimensions"]), int(metadata["finished"])
            names = [str(name) for name in json.loads(metadata["covariances"])]
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not the state of a sweep: {error!r}; remove it to start anew") from error
        check_unchanged(found, self._settings, path)
        if dimensions != self._load(self.members[:1])[0].numel() or not 0 < finished <= len(self.grid):
            raise ValueError(f"{path} does not fit these images and times; remove it to start anew")
        sums = self._allocate(dimensions, [], names)
        try:
            sums.restore(tensors, finished)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return sums

    def _save(self, path: Path, sums: Sums) -> None:
        metadata = {
            "settings": json.dumps(self._settings),
            "covariances": json.dumps(sums.covariances.names),
            "dimensions": str(sums.dimensions),
            "finished": str(sums.finished),
        }
        write_tensors(path, {**sums.tensors(), "times": self.grid.tensor}, metadata)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """What must agree for a sweep to go on where another one stopped."""
        network: Any = self._identity
        if network is None and isinstance(self.process.given_network, HeadedNetwork):
            network = self.process.given_network.identity()
        forward, rederived = self.process.forward, self.process.use_clipped_model_output
        return {
            **(network if isinstance(network, Mapping) else {"weights": network}),
            "schedule": forward.schedule.identity(),
            "eta": forward.eta,
            "data range": None if self.process.data_range is None else [float(end) for end in self.process.data_range],
            # None, as if there were no entry, is the usual: states that know nothing of these go on
            "ocm_probes": probing.probes if isinstance(probing := self.process.covariance, Ocm) else None,
            "clip_mean": None if self.process.bounds.clip_mean else False,
            "use_clipped_model_output": None if rederived == (forward.eta == 1) else rederived,
            "times": known_by(digest_numbers(self.grid.tensor), len(self.grid)),
            "seed": self.seed,
            "groups": self.groups,
            "images": images_identity(self.images),
            "condition": condition_identity(self.condition),
            "share of the images": [int(self.members[0]), len(self.members)],
            "noise": "by seed" if self.noise is None else "given",
            "covariances": self._covariances(),
            "last variances": list(self.last_variances),
            "cdf": self.cdf,
            "numbers per time": [None if f is None else self._digest(f) for f in self.numbers.values()],
            "spectra per time": self._spectra(),
        }

    def _digest(self, numbers: PerTime) -> dict[str, str]:
        return known_by(digest_numbers(torch.stack([number_at(numbers, t) for t in self.grid.times])))

    def _digest_spectrum(self, spectrum: Spectrum) -> dict[str, str]:
        some = self.grid.times[:: len(self.grid) // 8 + 1]  # all of them may be too many for the memory
        powers = torch.stack([torch.as_tensor(spectrum.at(t)) for t in some])
        return known_by(digest([digest_numbers(powers), self._plain(spectrum.basis.channels)]))

    def _spectra(self) -> dict[str, str] | None:
        """Spectra by name, if there are any."""
        found = {name: self._digest_spectrum(Spectrum.of(given)) for name, given in self.spectra.items()}
        return known_by(digest(found), ", ".join(found)) if found else None

    def _covariances(self) -> Any:
        """Covariances by name; one that was given as an object also by its class and what it holds."""
        if not isinstance(self._wanted, Mapping):
            return None if self._wanted is None else list(self._wanted)
        return {
            name: known_by(
                digest([type(covariance).__name__, [self._plain(part) for part in vars(covariance).values()]]), name
            )
            for name, covariance in self._wanted.items()
        }

    def _plain(self, part: Any) -> Any:
        """What a covariance object holds, as plain values."""
        if part is None or isinstance(part, bool | int | float | str):
            return part
        if isinstance(part, Tensor):
            return digest_numbers(part)
        if isinstance(part, Schedule):
            return part.identity()
        if isinstance(part, Spectrum):
            return self._digest_spectrum(part)
        if callable(part):
            return self._digest(part)
        raise ValueError(
            f"a covariance holds a {type(part).__name__}, by which a state is not known again; sweep it without a state"
        )

    def _load(self, index: Tensor) -> Tensor:
        x_0 = self.images[index] if isinstance(self.images, Tensor) else self.images.x_0(index)
        check_images(x_0, self.process.data_range)
        return x_0 if self.device is None else x_0.to(self.device)

    def _batches(self) -> list[Tensor]:
        return [self.members[start : start + self.batch_size] for start in range(0, len(self.members), self.batch_size)]


def cost_table(
    process: ReverseProcess,
    images: Tensor | Source,
    covariances: Sequence[str] | Mapping[str, Covariance] | None = None,
    *,
    progress: Callable[[SweepProgress], None] | None = None,
    **options: Any,
) -> CostTable:
    """Compute the cost of every step of every covariance, with one network evaluation per image and time.

    process: gives the network, the forward process and the data range. Of its covariance only probes of OCM are used.
    images: (n, *D), or a source of batches.
    covariances: names, or a dict of Covariance objects by name. By default all that need no head, and those whose head
    the network has.
    condition: further inputs of the network by name, each a tensor with one entry per image. By default what the source
    of images offers as `condition(index)`.
    times: some of the times, ending at the final one. By default all of them; for real times, 1000 evenly spaced ones.
    seed: noise depends on (seed, image number, t) alone. `elbo` with the same seed uses the same noise.
    noise: a callable t -> noise of all images, instead of the seed.
    last_variances, cdf: the conventions of the last step to keep, as in `elbo`.
    mean_square_noise, mean_square_residual: numbers per time for "analytic" and "npr_isotropic". By default the sweep
    measures them.
    spectra: a dict with keys "residual", "npr" and "sn", for "spectral", "npr_correlated" and "sn_correlated".
    groups: the number of groups of images that are kept apart for standard errors.
    shard: (number, count) sweeps one share of the images; `merge` joins the tables.
    state: a file that lets a stopped run resume. It is written every save_every seconds.
    identity: what identifies the network. A state file of another network is refused. By default that of a
    HeadedNetwork.
    progress: a function that is called after each batch.

    >>> from optcov import ForwardProcess, Schedule, Trajectory, oracle
    >>> schedule = Schedule.linear()
    >>> data = oracle.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.01, 0.01])
    >>> process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), data_range=None)
    >>> table = cost_table(process, data.sample(16), ["npr"], times=range(50, 1001, 50))
    >>> [len(table.optimal_all("npr", 10)[K]) for K in (1, 10)]
    [1, 10]
    """
    sweep = Sweep(process, images, covariances, **options)
    for step in sweep:
        if progress is not None:
            progress(step)
    return sweep.table


def merge(tables: Sequence[CostTable]) -> CostTable:
    """Join the tables of several shards of one set of images, by adding their sums."""
    first = tables[0]
    for table in tables[1:]:
        if (table.grid.times, table.covariances, table.dimensions) != (
            first.grid.times,
            first.covariances,
            first.dimensions,
        ):
            raise ValueError("tables of different times, covariances or image sizes cannot be merged; sweep them alike")
    sums = {name: torch.stack([table.sums[name] for table in tables]).sum(0) for name in first.sums}
    return replace(first, sums=sums)


def merge_processes(table: CostTable, processes: int) -> CostTable:
    """Merge the shards of all processes of a run under Accelerate. Every process gets the result."""
    if processes == 1:
        return table
    from accelerate.utils import reduce

    device = this_process().device  # a process group of GPUs adds nothing up that lies on the CPU
    summed = reduce({name: value.to(device) for name, value in table.sums.items()}, reduction="sum")
    return replace(table, sums={name: value.cpu() for name, value in summed.items()})


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
    return value
