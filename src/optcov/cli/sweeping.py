"""A sweep as commands run it: from a bundle and a data set, with a bar, resumable, over the processes of Accelerate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optcov.cli.console import announce, errors
from optcov.cli.options import counted, names
from optcov.cli.progress import fresh, track

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optcov.bundle import Bundle
    from optcov.covariances import PerTime
    from optcov.data import ImageSet
    from optcov.likelihood import CostTable, Sweep
    from optcov.schedule import Schedule


@dataclass(frozen=True)
class SweepOptions:
    """What the options of a command say about its sweeps."""

    bundle: str | Path
    data: str
    times: int
    designs: str
    eta: float
    last_variance: str
    cdf: str
    seed: int
    schedule: str | None
    batch_size: int


def run_sweep(
    options: SweepOptions,
    split: str,
    images: int,
    out: Path,
    numbers_from: CostTable | None = None,
    lengths: Sequence[int] = (),
) -> CostTable:
    """Sweep the first images of a split; the state lies in `out`, so that a stopped command goes on.

    lengths: numbers of steps that are wanted of the table; refused before the sweep if none fits.
    """
    from optcov import bundle as bundles
    from optcov.forward import ForwardProcess
    from optcov.identity import images_identity, remember
    from optcov.likelihood import Sweep, gather
    from optcov.processes import this_process
    from optcov.reverse import ReverseProcess

    state = this_process()
    model = bundles.load(options.bundle)
    whole = _images(options.data, split, model)
    source = whole.select(slice(0, images))
    kept = {**model.identity(), f"{split} images": images_identity(whole)}
    model = model if options.schedule is None else model.with_schedule(options.schedule)
    process = ReverseProcess(
        model.network.to(state.device), ForwardProcess(model.schedule, options.eta), "beta_tilde", model.data_range
    )
    designs = names(options.designs) or None
    mean_square_noise, mean_square_residual = _numbers_per_time(options, designs, model, numbers_from)
    key = _key(options, len(source), kept, 0 if numbers_from is None else int(numbers_from.images.sum()))
    sweep = Sweep(
        process,
        source,
        designs,
        times=some_times(model.schedule, options.times),
        seed=options.seed,
        last_variances=[options.last_variance],
        cdf=options.cdf,
        mean_square_noise=mean_square_noise,
        mean_square_residual=mean_square_residual,
        batch_size=options.batch_size,
        shard=(state.process_index, state.num_processes),
        device=state.device,
        identity=model.identity(),
        state=out / f"{split}-{key}-{state.process_index}-of-{state.num_processes}.safetensors",
    )
    _check_lengths(sweep, lengths)
    if state.is_main_process:
        if not any(out.glob("*.safetensors")):
            (out / "run.json").unlink(missing_ok=True)  # of a run that left nothing
        remember(out / "run.json", kept, out, "choose another directory by --out, or undo that")
    resumed = "" if not sweep.state or not sweep.state.exists() else f"; goes on with what is kept in {out}"
    announce(
        f"{model.name}: every step between {len(sweep.grid)} times, for "
        f"{counted(len(source), images, f'{split} images')}{resumed}"
    )
    for _ in track(sweep, len(sweep), f"{split} images", "batches", fresh(lambda progress: progress.done)):
        pass
    return gather(sweep.table, state.num_processes)


def _key(options: SweepOptions, *facts: object) -> str:
    """Tells sweeps apart that share a directory: each choice of options has a state of its own."""
    from optcov.identity import digest

    names = ("times", "designs", "eta", "last_variance", "cdf", "seed", "schedule")  # those that change the result
    return digest([[getattr(options, name) for name in names], facts])[:12]


def _images(data: str, split: str, model: Bundle) -> ImageSet:
    from optcov import data as image_data

    source = image_data.with_channels(image_data.load_mixed(data, split), model.image_shape[0])
    if source.shape != tuple(model.image_shape):
        raise ValueError(f"{data} has images of shape {source.shape}, but {model.name} needs {model.image_shape}")
    return source


def _check_lengths(sweep: Sweep, lengths: Sequence[int]) -> None:
    """Refuse numbers of steps none of which fits the times of a sweep, and name those that do not."""
    from optcov.likelihood import fitting_lengths

    left_out = sorted(set(lengths) - set(fitting_lengths(sweep.grid, lengths))) if lengths else []
    if left_out:
        announce(f"K = {', '.join(map(str, left_out))} left out: there are only {len(sweep.grid)} times")


def report_clamps(table: CostTable) -> None:
    """Tell how many variances of each design were out of bounds."""
    from optcov.covariances import clamped_in_words

    for design, (below, above) in table.clamp_rates().items():
        if below or above:
            errors.print(f"{design}: {clamped_in_words(design, below, above)}", highlight=False, soft_wrap=True)


def _numbers_per_time(
    options: SweepOptions, designs: Sequence[str] | None, model: Bundle, numbers_from: CostTable | None
) -> tuple[PerTime | None, PerTime | None]:
    """Mean squares of noise and residual: those of another sweep, or None for what this sweep itself measures.

    A last step with the design's own variance needs them while the images stream, so that they are the bundle's.
    """
    if options.last_variance == "own":
        wanted = {"analytic", "npr_isotropic"} & set(designs or ("analytic", "npr_isotropic"))
        noise = model.per_time("mean_square_noise") if "analytic" in wanted else None
        return noise, model.per_time("mean_square_residual") if "npr_isotropic" in wanted else None
    if numbers_from is None:
        return None, None
    return numbers_from.mean_square_noise, numbers_from.mean_square_residual


def some_times(schedule: Schedule, count: int) -> list[float] | None:
    """Evenly spaced times of the schedule, its last one among them; None for all."""
    from optcov.trajectory import Trajectory

    if count == 1:
        raise ValueError("--times 1 leaves no step between two times; take at least 2, or 0 for all times")
    return list(Trajectory.even(schedule, count).times) if count else None
