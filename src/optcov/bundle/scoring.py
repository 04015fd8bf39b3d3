"""Images scored by a bundle: sweeps that go on after a stop, bits/dim, optimal trajectories, classes by bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.bundle.bundle import Bundle
from optcov.bundle.conditions import with_labels
from optcov.covariances import Covariance, PerTime, Spectrum
from optcov.data.tensors import DataSet
from optcov.forward import ForwardProcess
from optcov.identity import condition_identity, digest, images_identity, remember
from optcov.likelihood import (
    CostTable,
    Estimate,
    Sweep,
    fitting_lengths,
    likelihood_table,
    merge_processes,
    pool_repeats,
)
from optcov.likelihood.classes import class_bounds
from optcov.likelihood.elbo import check_ends_at_final_time
from optcov.likelihood.result import BITS, NATS, Likelihoods
from optcov.methods import find_method
from optcov.networks.calls import takes_texts
from optcov.networks.classes import LABELS, takes_labels
from optcov.networks.guidance import check_guidance
from optcov.processes import this_process
from optcov.progress import fresh, track
from optcov.reverse import ReverseProcess
from optcov.schedule import check_whole, is_whole
from optcov.storage import directory_lock
from optcov.text_table import counted
from optcov.trajectory import Trajectory

Say = Callable[[str], None]  # what a long call tells on the way


@final
@dataclass(frozen=True)
class Conventions:
    """What a bound depends on besides the images. times: how many evenly spaced times are swept; 0 for all."""

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
    """Some images of a data set, the first `count` of it.

    labels: whether a network with classes is told the labels of the images, if they have some.
    """

    whole: DataSet
    count: int
    split: str = "test"
    labels: bool = True

    @property
    def images(self) -> DataSet:
        """Those that are scored."""
        return self.whole.select(slice(0, self.count))

    def condition(self, bundle: Bundle) -> dict[str, Tensor] | None:
        """What the bundle's network is told about the images, if nothing else is given."""
        labels = self.images.labels
        if not self.labels or labels is None:
            return None
        if bundle.classes is None:
            return {LABELS: labels} if takes_labels(bundle.unet) else None
        return bundle.told_labels(labels, self.whole.name)

    def told(self, bundle: Bundle, condition: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The condition that is given, or else that of the images, once it is checked."""
        given = self.condition(bundle) if condition is None else condition
        return bundle.check_told(given, len(self.images))

    def __str__(self) -> str:
        return counted(len(self.whole), self.count, f"{self.split} images")


@final
@dataclass(frozen=True)
class OptimalTimes:
    """The best trajectory of every length for a method, with the costs that chose it."""

    bundle: Bundle  # with the trajectories in it
    trajectories: Mapping[int, Trajectory]  # by length
    scores: Mapping[int, Estimate]  # bits/dim on the images that chose them
    clamped: Mapping[str, tuple[float, float]]  # shares of variances below and above the bounds


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
    """Price every step between the times, over the processes of Accelerate; with a work directory it is resumable.

    numbers_from: whose numbers per time the analytic variances use; None: what the sweep measures on its own images.
    lengths: numbers of steps that are wanted of the table; refused before the sweep if none fits.
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
        remember(work / "run.json", kept, work, "choose another directory by --out, or undo that")
    what = f"{scored.split} images"
    for _ in track(swept, len(swept), what, "batches", fresh(lambda now: now.done), show=progress):
        pass
    return merge_processes(swept.table, state.num_processes)


def bits_per_dim(
    bundle: Bundle,
    test: Scored,
    train: Scored | None = None,
    steps: Sequence[int] = (10, 25),
    conventions: Conventions | None = None,
    *,
    repeats: int = 1,
    work: Path | None = None,
    **options: Any,
) -> Likelihoods:
    """Bound the bits/dim of test images for every covariance and K at even times, and, with training images to choose
    them by, at optimal ones.

    repeats: with this many seeds, means and deviations over them. options: those of `sweep`.
    """
    conventions = conventions or Conventions()
    runs, rates = [], {}
    with _held(work):
        for number in range(repeats):
            now = replace(conventions, seed=conventions.seed + number)
            chosen = None if train is None else sweep(bundle, train, now, work=work, lengths=steps, **options)
            source = chosen if chosen is not None else None if bundle.numbers is None else bundle
            table = sweep(bundle, test, now, work=work, numbers_from=source, lengths=steps, **options)
            rates = table.clamp_rates()
            runs.append(likelihood_table(chosen, table, steps, now.last_variance))
    rows = runs[0] if repeats == 1 else pool_repeats(runs)
    settings = {"eta": conventions.eta, "last_variance": conventions.last_variance, "cdf": conventions.cdf}
    settings |= {"repeats": repeats, "images": int(table.images.sum())}
    settings |= {} if chosen is None else {"train_images": int(chosen.images.sum())}
    latents = bundle.data_range is None
    how = "" if latents else f", cdf {conventions.cdf}"
    title = f"{bundle.name}: {NATS if latents else BITS}, last variance {conventions.last_variance}{how}"
    return Likelihoods(tuple(rows), title, settings, rates, latents)


def score_tensor(
    bundle: Bundle,
    images: Any,
    steps: Sequence[int] | int = (10, 25),
    methods: Sequence[str] | None = None,
    *,
    condition: Mapping[str, Tensor] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    batch_size: int = 64,
    progress: bool = True,
    work: str | Path | None = None,
    **conventions: Any,
) -> Likelihoods:
    """`Bundle.bits_per_dim`: images in memory at even times, one sweep for each number of steps."""
    lengths = _lengths(steps)
    if check_guidance(guidance) != 1:
        raise ValueError(
            f"guidance = {guidance} has no likelihood: the guided prediction is that of no model of the data; leave "
            f"guidance out"
        )
    if methods is not None:
        conventions["covariances"] = _covariances_of(methods)
    known_options = [entry.name for entry in fields(Conventions) if entry.name != "times"]
    unknown = [name for name in conventions if name not in known_options]
    if unknown:
        raise ValueError(
            f"bits_per_dim has no option {unknown[0]!r}; it has methods, condition, labels, batch_size, progress, "
            f"work, {', '.join(known_options)}"
        )
    check_whole("batch_size", batch_size, 1)
    data = bundle.data_of(images, "test")
    condition = with_labels(condition, labels, len(data))
    if condition is None and data.captions is not None and takes_texts(bundle.unet):
        raise ValueError(
            f"{data.name} has captions, but {bundle.name} holds nothing that encodes them; pass them encoded as "
            f"condition=, or images alone"
        )
    options: dict[str, Any] = {"condition": condition, "batch_size": batch_size, "progress": progress}
    options["work"] = None if work is None else Path(work)
    parts = []
    for K in lengths:
        known = Conventions(**{**conventions, "times": K})
        parts.append(bits_per_dim(bundle, Scored(data, len(data), "given"), None, [K], known, **options))
    rows = tuple(row for part in parts for row in part.rows)
    return replace(parts[-1], rows=rows)


def optimal_trajectories(
    bundle: Bundle,
    images: Scored,
    method: str = "NPR-DDPM",
    max_steps: int = 100,
    conventions: Conventions | None = None,
    *,
    work: Path | None = None,
    **options: Any,
) -> OptimalTimes:
    """Find the times of every length that make the bound of a method least on training images."""
    covariance = _covariance_of(method)
    chosen = replace(conventions or Conventions(), covariances=(covariance,), eta=1.0)
    with _held(work):
        table = sweep(bundle, images, chosen, work=work, **options)
    best = table.optimal_all(covariance, min(max_steps, len(table.grid)), chosen.last_variance)
    scores = {K: table.score(covariance, path, chosen.last_variance) for K, path in best.items()}
    found = bundle.with_trajectories(method, list(best.values()))
    return OptimalTimes(found, best, scores, table.clamp_rates())


def class_log_probabilities(
    bundle: Bundle,
    images: Any,
    steps: int = 10,
    *,
    method: str | None = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: bool = True,
) -> Tensor:
    """`Bundle.class_log_probabilities`: float64 (B, classes), columns in the order of `bundle.class_numbers`."""
    for name, value, least in (("steps", steps, 2), ("batch_size", batch_size, 1), ("seed", seed, None)):
        check_whole(name, value, least)
    if bundle.classes is None:
        raise ValueError(f"{bundle.name} knows no classes, so that it cannot tell them apart")
    method = method or _classifier(bundle)
    _covariance_of(method)  # refuses one without a bound
    data = bundle.data_of(images, "test")
    process, trajectory = bundle.reverse_process(method, all_heads=False), bundle.trajectory(steps)
    check_ends_at_final_time(trajectory, bundle.schedule)
    parts, starts = [], range(0, len(data), batch_size)
    for first in track(starts, len(starts), f"{bundle.classes} classes, {steps} steps", "batches", show=progress):
        numbers = range(first, min(first + batch_size, len(data)))
        x_0 = data.x_0(torch.arange(numbers.start, numbers.stop)).to(bundle.device)
        bounds = class_bounds(process, x_0, trajectory, bundle.class_numbers, seed=seed, images=numbers)
        parts.append((-bounds).log_softmax(1).cpu())
    return torch.cat(parts)


def _classifier(bundle: Bundle) -> str:
    """The method whose bound tells classes apart best, among those that the bundle can do: not the tightest one."""
    ways = {"A-DDPM": bundle.numbers is not None, "NPR-DDPM": "npr" in bundle.heads, "SN-DDPM": "sn" in bundle.heads}
    return next((method for method, possible in ways.items() if possible), "DDPM, beta-tilde")


def _held(work: Path | None) -> AbstractContextManager[None]:
    """One lock for a run; its other processes write the states of their own sweeps alone."""
    return nullcontext() if work is None or not this_process().is_main_process else directory_lock(work)


def _lengths(steps: Any) -> list[int]:
    """Numbers of steps as a list, or a ValueError that names them."""
    found = (
        [steps]
        if is_whole(steps)
        else list(steps)
        if isinstance(steps, Iterable) and getattr(steps, "ndim", 1) != 0
        else []
    )
    if not found or not all(is_whole(K) and K >= 2 for K in found):
        raise ValueError(f"steps = {steps!r} must be numbers of steps of at least 2, such as 10 or [10, 25]")
    return [int(K) for K in dict.fromkeys(found)]


def _covariances_of(methods: Any) -> tuple[str, ...]:
    names = [methods] if isinstance(methods, str) else list(methods) if isinstance(methods, Iterable) else []
    if not names:
        raise ValueError(f"methods = {methods!r} names no method; pass a list such as ['NPR-DDPM'], or None for all")
    return tuple(dict.fromkeys(_covariance_of(name) for name in names))


def _covariance_of(method: str) -> str:
    """The covariance of a method that has a bound."""
    row = find_method(method)
    if row.covariance is None or row.eta != 1:
        raise ValueError(
            f"{row.name} has no finite variational bound: it needs a reverse process with noise; choose a method such "
            f"as {row.name.replace('DDIM', 'DDPM') if '-DDIM' in row.name else 'NPR-DDPM'}"
        )
    return row.covariance


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
