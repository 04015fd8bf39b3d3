"""A sweep as commands run it: from a bundle and a data set, with a bar, resumable, over the processes of Accelerate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optcov.cli.console import announce, track

if TYPE_CHECKING:
    from optcov.likelihood import CostTable, SweepProgress
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
    options: SweepOptions, split: str, images: int, out: Path, numbers_from: CostTable | None = None
) -> CostTable:
    """Sweep the first images of a split; the state lies in `out`, so that a stopped command goes on."""
    import torch
    from accelerate import PartialState

    from optcov import bundle as bundles
    from optcov import data as image_data
    from optcov.forward import ForwardProcess
    from optcov.likelihood import Sweep, gather
    from optcov.networks import fingerprint
    from optcov.reverse import ReverseProcess

    state = PartialState()
    model = bundles.load(options.bundle, options.schedule)
    source = image_data.load(options.data, split)
    source = source.select(torch.arange(min(images, len(source))))
    if source.shape != tuple(model.image_shape):
        raise ValueError(
            f"{options.data} has images of shape {source.shape}, but {model.name} needs {model.image_shape}"
        )
    process = ReverseProcess(
        model.network.to(state.device), ForwardProcess(model.schedule, options.eta), "beta_tilde", model.data_range
    )
    sweep = Sweep(
        process,
        source,
        [name.strip() for name in options.designs.split(",")] if options.designs else None,
        times=some_times(model.schedule, options.times),
        seed=options.seed,
        last_variances=[options.last_variance],
        cdf=options.cdf,
        mean_square_noise=None if numbers_from is None else numbers_from.mean_square_noise,
        mean_square_residual=None if numbers_from is None else numbers_from.mean_square_residual,
        batch_size=options.batch_size,
        shard=(state.process_index, state.num_processes),
        device=state.device,
        identity=fingerprint(model.network),
        state=out / f"{split}-seed{options.seed}-{state.process_index}-of-{state.num_processes}.safetensors",
    )
    announce(f"{model.name}: every step between {len(sweep.grid)} times, for {len(source)} {split} images")
    _drain(sweep, f"{split} images")
    return gather(sweep.table, state.num_processes)


def some_times(schedule: Schedule, count: int) -> list[float] | None:
    """Evenly spaced times of the schedule, its last one among them; None for all."""
    from optcov.trajectory import Trajectory

    return list(Trajectory.even(schedule, count).times) if count else None


def _drain(sweep: object, what: str) -> None:
    from optcov.likelihood import Sweep

    assert isinstance(sweep, Sweep)
    before = 0

    def fresh(progress: SweepProgress) -> int:
        nonlocal before
        step, before = progress.done - before, progress.done
        return step

    for _ in track(sweep, len(sweep), what, "batches", fresh):
        pass
