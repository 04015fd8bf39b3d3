"""Sweeps of a bundle over images. They give the cost of every step between two times, and resume if stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from optcov.bundle.bundle import Bundle
from optcov.covariances import Covariance, PerTime, Spectrum
from optcov.data.tensors import DataSet
from optcov.forward import ForwardProcess
from optcov.identity import condition_identity, digest, images_identity, remember
from optcov.likelihood import CostTable, Sweep, fitting_lengths, merge_processes
from optcov.networks.classes import LABELS, takes_labels
from optcov.processes import this_process
from optcov.progress import fresh, track
from optcov.reverse import ReverseProcess
from optcov.schedule import check_whole
from optcov.text_table import counted
from optcov.trajectory import Trajectory

Say = Callable[[str], None]  # what a long call tells on the way


@final
@dataclass(frozen=True)
class Conventions:
    """The settings that a bound depends on, besides the images.

    times: sweep this many evenly spaced times; 0 means all.
    """

    covariances: tuple[str, ...] | None = None  # by default all that the bundle can do
    times: int = 0
    eta: float = 1.0
    last_variance: str = "paper"
    cdf: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("seed", self.seed)
        if self.times == 1 or self.times < 0:
            raise ValueError(f"times = {self.times} leaves no step between two times; take at least 2, or 0 for all")


@final
@dataclass(frozen=True)
class Scored:
    """The first `count` images of a data set.

    labels: whether a network with classes is given the labels of the images, if they have labels.
    """

    whole: DataSet
    count: int
    split: str = "test"
    labels: bool = True

    @property
    def images(self) -> DataSet:
        """The images that are scored."""
        return self.whole.select(slice(0, self.count))

    def condition(self, bundle: Bundle) -> dict[str, Tensor] | None:
        """The condition from the images' labels, if no other is given."""
        labels = self.images.labels
        if not self.labels or labels is None:
            return None
        if bundle.classes is None:
            return {LABELS: labels} if takes_labels(bundle.unet) else None
        return bundle.told_labels(labels, self.whole.name)

    def told(self, bundle: Bundle, condition: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The given condition, or else that of the images, after a check."""
        given = self.condition(bundle) if condition is None else condition
        return bundle.check_told(given, len(self.images))

    def __str__(self) -> str:
        return counted(len(self.whole), self.count, f"{self.split} images")


def sweep(
    bundle: Bundle,
    scored: Scored,
    conventions: Conventions,
    *,
    work: Path | None = None,
    numbers_from: CostTable | Bundle | None = None,
    lengths: Sequence[int] = (),
    condition: Mapping[str, Tensor] | None = None,
    batch_size: int = 64,
    progress: bool = True,
    say: Say | None = None,
) -> CostTable:
    """Compute the cost of every step between the times, in all processes of Accelerate.

    work: a directory that keeps the state; the same call with it resumes.
    numbers_from: where the analytic variances take their numbers per time from. None: the sweep measures them on its
    own images.
    lengths: the numbers of steps that will be asked of the table. If none fits, the sweep is refused before it starts.
    """
    state, images, schedule = this_process(), scored.images, bundle.schedule
    process = ReverseProcess(
        bundle.network.to(state.device), ForwardProcess(schedule, conventions.eta), "beta_tilde", bundle.data_range
    )
    numbers = _numbers_per_time(bundle, conventions, numbers_from)
    kept = {**bundle.on_its_own_schedule().identity(), f"{scored.split} images": images_identity(scored.whole)}
    told = scored.told(bundle, condition)
    theirs = int(numbers_from.images.sum()) if isinstance(numbers_from, CostTable) else numbers_from and "bundle"
    facts: tuple[Any, ...] = (len(images), kept, theirs)
    facts = (*facts, condition_identity(told)) if told else facts
    key = digest([asdict(conventions), schedule.identity(), facts])[:12]
    file = f"{scored.split}-{key}-{state.process_index}-of-{state.num_processes}.safetensors"
    times = list(Trajectory.even(schedule, conventions.times).times) if conventions.times else None
    swept = Sweep(
        process,
        images,
        conventions.covariances,
        condition=told,
        times=times,
        seed=conventions.seed,
        last_variances=[conventions.last_variance],
        cdf=conventions.cdf,
        batch_size=batch_size,
        shard=(state.process_index, state.num_processes),
        device=state.device,
        identity=bundle.identity(),
        state=None if work is None else work / file,
        mean_square_noise=numbers.get("mean_square_noise"),
        mean_square_residual=numbers.get("mean_square_residual"),
        spectra=_spectra(bundle, conventions.covariances),
    )
    if say is not None:
        _tell(say, swept, scored, lengths, bundle.name, work)
    elif lengths:
        fitting_lengths(swept.grid, lengths)
    if work is not None and state.is_main_process:
        if not any(work.glob("*.safetensors")):
            (work / "run.json").unlink(missing_ok=True)  # of a run that left nothing
        remember(work / "run.json", kept, work, "choose another directory by --out, or undo that", part=True)
    what = f"{scored.split} images"
    for _ in track(swept, len(swept), what, "batches", fresh(lambda now: now.done), show=progress):
        pass
    return merge_processes(swept.table, state.num_processes)


def _numbers_per_time(
    bundle: Bundle, conventions: Conventions, numbers_from: CostTable | Bundle | None
) -> dict[str, PerTime | None]:
    """Numbers per time by name, of another sweep or of the bundle; none where this sweep is to measure its own.

    A last step with the covariance's own variance needs them while the images stream, so that they are the bundle's.
    """
    if conventions.last_variance != "own":
        if numbers_from is None:
            return {}
        if isinstance(numbers_from, CostTable):
            return {
                "mean_square_noise": numbers_from.mean_square_noise,
                "mean_square_residual": numbers_from.mean_square_residual,
            }
    wanted = conventions.covariances or tuple(Covariance.registry)
    needed = {Covariance.registry[name].number for name in wanted if name in Covariance.registry} - {None}
    if conventions.covariances is None and bundle.numbers is not None:
        needed &= set(bundle.numbers.tensors())  # foreign files lack some, and nobody asked for their covariances
    return {str(name): bundle.per_time(str(name)) for name in needed}


def _spectra(bundle: Bundle, covariances: Sequence[str] | None) -> dict[str, Spectrum]:
    """The spectra that the covariances need, or all there are; an error if a covariance asked for lacks its own."""
    if covariances is None:
        names = [] if bundle.spectra is None else list(bundle.spectra.names)
    else:
        kinds = (Covariance.registry[name] for name in covariances if name in Covariance.registry)
        names = [kind.spectrum for kind in kinds if kind.spectrum is not None]
    return {name: bundle.spectrum(name) for name in names}


def _tell(say: Say, swept: Sweep, scored: Scored, lengths: Sequence[int], name: str, work: Path | None) -> None:
    left_out = sorted(set(lengths) - set(fitting_lengths(swept.grid, lengths))) if lengths else []
    if left_out:
        say(f"K = {', '.join(map(str, left_out))} left out: there are only {len(swept.grid)} times")
    resumed = f"; goes on with what is kept in {work}" if swept.state and swept.state.exists() else ""
    say(f"{name}: every step between {len(swept.grid)} times, for {scored}{resumed}")
