"""Numbers per time: Gamma_t = E mean(eps_hat^2) of Analytic-DPM (Eq. 8) and E mean((eps - eps_hat)^2), with errors.

The same images with the same noise serve every time, so that neighbouring numbers differ by what time does to them and
not by luck. Between the times of a sub-grid they are interpolated in the log-SNR; `interpolation_error` says how well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from optcov import processes
from optcov.bundle import NumbersPerTime
from optcov.fitting.batches import Source, step_generator
from optcov.fitting.config import TrainingError
from optcov.fitting.journal import Journal
from optcov.forward import ForwardProcess
from optcov.gaussian import mean_square
from optcov.identity import condition_identity, images_identity
from optcov.networks import HeadedNetwork
from optcov.noise import batch_noise
from optcov.prediction import Prediction, condition_of
from optcov.schedule import Schedule

_IN_VELOCITY = ("velocity_variance", "velocity_residual")  # known in more recent records alone
FARTHEST = 25.0  # of levels in bins: where no signal is left the log-SNR is infinite
_MEASURED = ("mean_square_noise", "mean_square_residual", "mean_square_noise_error", "mean_square_residual_error")
MOST_TIMES = 100_000  # as many as the longest schedule has


@final
@dataclass(frozen=True)
class TimeRecord:
    """What was measured at one time."""

    time: float
    images: int
    mean_square_noise: float
    mean_square_noise_error: float
    mean_square_residual: float
    mean_square_residual_error: float
    velocity_variance: float | None = None
    velocity_residual: float | None = None


def time_grid(schedule: Schedule, count: int | None = None) -> Tensor:
    """Times to measure at, ascending: all of a discrete schedule, or about `count`, evenly spaced in the log-SNR."""
    if count is None:
        if not schedule.discrete:
            raise TrainingError("a continuous schedule has no 'every time'; say how many to measure at")
        return schedule.full_grid()
    if count < 2:
        raise TrainingError(f"{count} times are too few to interpolate between; use 2 or more")
    if count > MOST_TIMES:
        raise TrainingError(f"{count} times are too many to measure at; use {MOST_TIMES} or fewer")
    first = schedule.first_time
    ends = schedule.log_snr(torch.tensor([first, schedule.last_time_with_signal], dtype=torch.float64))
    levels = torch.linspace(float(ends[0]), float(ends[1]), count, dtype=torch.float64)
    times = schedule.time_at(levels)
    times[0], times[-1] = first, schedule.final_time
    ascending: Tensor = torch.unique(schedule.nearest(times))
    return ascending


def measure(
    network: HeadedNetwork,
    source: Source,
    times: Sequence[float] | Tensor,
    images: int = 1024,
    batch_size: int = 128,
    seed: int = 0,
    directory: Path | None = None,
) -> Iterator[TimeRecord]:
    """Measure at each of the times of the network's own schedule; yields a record as each is done.

    source: what it offers as `condition(index)`, the network is told.
    directory: keeps the records, so that a run that was stopped goes on where it was.
    """
    chosen = chosen_images(source, images, seed)
    condition_of(source, chosen)  # refuses one that does not fit before the first evaluation
    grid = network.native_schedule.check_times(torch.as_tensor(times))
    accelerator = processes.accelerator()
    journal: Journal | None = None
    if directory is not None and accelerator.is_main_process:
        journal = Journal(Path(directory) / "numbers.jsonl", _identity(network, source, chosen, seed))
    found = broadcast_object_list([journal.read() if journal else []])[0]
    try:
        done = {record["time"]: TimeRecord(**record) for record in found}
    except (KeyError, TypeError) as error:
        raise TrainingError(f"numbers.jsonl in {directory} holds no numbers per time: {error}; remove it") from error
    network = network.to(accelerator.device).eval()
    for t in grid.tolist():
        if t not in done:
            done[t] = _measure_at(network, source, chosen, t, batch_size, seed, accelerator)
            if journal:
                journal.append(asdict(done[t]))
        yield done[t]


def _identity(network: HeadedNetwork, source: Source, chosen: Tensor, seed: int) -> dict[str, object]:
    """What numbers belong to, so that those of another network or other images are not taken for them."""
    return {
        **network.identity(heads=()),
        "data": images_identity(source),
        "condition": condition_identity(condition_of(source, chosen)),
        "images per time": len(chosen),
        "seed": seed,
    }


@torch.no_grad()
def _measure_at(
    network: HeadedNetwork,
    source: Source,
    chosen: Tensor,
    t: float,
    batch_size: int,
    seed: int,
    accelerator: Accelerator,
) -> TimeRecord:
    process = ForwardProcess(network.schedule)
    sums = torch.zeros(8, dtype=torch.float64, device=accelerator.device)
    mine = chosen.tensor_split(accelerator.num_processes)[accelerator.process_index]
    for index in mine.split(batch_size):
        x_0 = source.x_0(index).to(accelerator.device)
        noise = batch_noise(seed, index.tolist(), 0, x_0.shape[1:]).to(x_0)
        x_t = process.diffuse(x_0, t, noise)
        condition = {name: value.to(x_0.device) for name, value in condition_of(source, index).items()}
        prediction = network.prediction_from(network.features(x_t, t, **condition), x_t, t)
        squares = (mean_square(prediction.noise), mean_square(noise - prediction.noise))
        per_image = torch.stack([*squares, *velocity_squares(prediction, x_0, noise)])
        sums += torch.cat([per_image.sum(1), per_image.square().sum(1)])
    total = accelerator.reduce(sums, "sum").cpu() / len(chosen)
    mean, spread = total[:4], (total[4:] - total[:4].square()).clamp(min=0.0)
    if not bool(total.isfinite().all()):
        raise TrainingError(f"the network returned NaN or infinity at time {t}; check its weights and its precision")
    error = (spread / max(1, len(chosen) - 1)).sqrt()
    known = [float(value) for value in (mean[0], error[0], mean[1], error[1], mean[2].clamp(min=0.0), mean[3])]
    return TimeRecord(t, len(chosen), *known)


def velocity_squares(prediction: Prediction, x_0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """u^2 - u_hat^2 and (u - u_hat)^2 of the velocity u, averaged over pixels, (B,) each, float64."""
    known, predicted = prediction.in_unit("velocity", x_0, noise), prediction.in_unit("velocity")
    return mean_square(known) - mean_square(predicted), mean_square(known - predicted)


def chosen_images(source: Source, count: int, seed: int) -> Tensor:
    """Positions of some images, by a seeded permutation, so that more images include fewer."""
    if count < 2:
        raise TrainingError(f"{count} images are too few for a standard error; use 2 or more")
    return torch.randperm(len(source), generator=step_generator(seed, "measure", 0))[:count]


def numbers_per_time(records: Iterable[TimeRecord]) -> NumbersPerTime:
    """Records to what a bundle stores."""
    ordered = sorted(records, key=lambda record: record.time)
    measured = [*_MEASURED, *(name for name in _IN_VELOCITY if all(getattr(r, name) is not None for r in ordered))]
    columns = {name: [getattr(record, name) for record in ordered] for name in measured}
    return _as_numbers({"times": [record.time for record in ordered], **columns})


def interpolation_error(numbers: NumbersPerTime, schedule: Schedule, name: str) -> float:
    """Largest error of interpolating the numbers of a name between its times, absolute, estimated.

    Every second time is left out and interpolated from its neighbours. The error of linear interpolation goes with
    the square of the spacing, so that a quarter of what is seen there remains for the whole grid.
    """
    if len(numbers.times) < 3:
        raise TrainingError(f"{len(numbers.times)} times are too few to judge an interpolation; measure at 3 or more")
    levels = -schedule.log_snr(numbers.times).numpy()
    values = numbers.tensors()[name].numpy()
    guess = np.interp(levels[1:-1:2], levels[0::2], values[0::2])
    return float(np.abs(guess - values[1:-1:2]).max() / 4)


def binned(samples: Mapping[str, Tensor], schedule: Schedule, bins: int = 64) -> NumbersPerTime:
    """Numbers per time from single samples at random times, pooled in bins of the log-SNR.

    samples: "time", "mean_square_noise", "mean_square_residual", (n,) each, as the fit of heads gathers them, and
    "velocity_variance", "velocity_residual" if they are known.
    """
    level = (-schedule.log_snr(samples["time"])).clamp(-FARTHEST, FARTHEST)
    low, high = float(level.min()), float(level.max())
    bin_of = ((level - low) / max(high - low, 1e-12) * bins).long().clamp(max=bins - 1)
    columns: dict[str, list[float]] = {name: [] for name in ("times", *_MEASURED)}
    for number in sorted(set(bin_of.tolist())):
        inside = bin_of == number
        count = int(inside.sum())
        time = float(samples["time"][inside].double().mean())
        columns["times"].append(float(schedule.nearest(torch.tensor(time, dtype=torch.float64))))
        for name in ("mean_square_noise", "mean_square_residual"):
            values = samples[name][inside].double()
            columns[name].append(float(values.mean()))
            columns[f"{name}_error"].append(float(values.std() / count**0.5) if count > 1 else float(values.mean()))
        for name in (name for name in _IN_VELOCITY if name in samples):
            columns.setdefault(name, []).append(max(0.0, float(samples[name][inside].double().mean())))
    return _as_numbers(columns)


def _as_numbers(columns: Mapping[str, Sequence[float]]) -> NumbersPerTime:
    return NumbersPerTime(**{name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()})
