"""Numbers per time: Gamma_t = E mean(eps_hat^2) of Analytic-DPM (Eq. 8) and E mean((eps - eps_hat)^2), with errors.

E mean(eps^2) is known to be 1. The drawn noise deviates from this by chance, and Gamma_t deviates with it. The share
that both have in common over the images is subtracted from Gamma_t. A few images are measured at each time. With
`rotate`, neighbouring times use other images; without it, all times use the same images with the same noise. `smoothed`
fits parabolas over neighbouring noise levels, so that each number rests on several times as many images. Between the
times of a sub-grid, numbers are interpolated in the log-SNR; `interpolation_error` estimates the error. If a
`SpectrumMeter` is given, the spectra are measured in the same passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from optcov import processes
from optcov.bundle import NumbersPerTime
from optcov.bundle.spectra import noise_levels
from optcov.covariances import Example
from optcov.fitting.batches import step_generator
from optcov.fitting.config import TrainingError
from optcov.fitting.journal import Journal
from optcov.fitting.spectra import SpectrumMeter, local_fit
from optcov.forward import ForwardProcess
from optcov.gaussian import mean_square
from optcov.identity import condition_identity, images_identity
from optcov.networks import HeadedNetwork
from optcov.noise import batch_noise
from optcov.prediction import Prediction, Source, condition_of
from optcov.schedule import Schedule

_IN_VELOCITY = ("velocity_variance", "velocity_residual")  # known in more recent records alone
BINS = 64  # of the log-SNR, in which single samples are pooled
FARTHEST = 25.0  # of levels in bins: where no signal is left the log-SNR is infinite
_MEASURED = ("mean_square_noise", "mean_square_residual", "mean_square_noise_error", "mean_square_residual_error")
MOST_TIMES = 100_000  # as many as the longest schedule has
MOST_BLOCKS = 16  # of images, by turns
SMOOTHING = 2.0  # width of the kernel over noise levels, in spacings
FEWEST_SMOOTHED = 12  # times: fewer are too far apart


@final
@dataclass(frozen=True)
class TimeRecord:
    """The measured numbers of one time."""

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
    *,
    rotate: bool = False,
    meter: SpectrumMeter | None = None,
) -> Iterator[TimeRecord]:
    """Measure at times of the network's own schedule. Yields a record after each time.

    source: the data. Its `condition(index)`, if it has one, gives the network's further inputs.
    directory: keeps the records, so that a stopped run resumes.
    rotate: use different images at neighbouring times, as far as there are enough.
    meter: measures the spectra, too.
    """
    blocks = image_blocks(source, images, seed, MOST_BLOCKS if rotate else 1)
    chosen = torch.cat(blocks)
    condition_of(source, chosen)  # refuses one that does not fit before the first evaluation
    grid = network.native_schedule.check_times(torch.as_tensor(times))
    accelerator = processes.accelerator()
    journal: Journal | None = None
    if directory is not None and accelerator.is_main_process:
        identity = _identity(network, source, chosen, seed) | {"images per time": len(blocks[0])}
        identity |= {"heads": sorted(network.heads)} if meter else {}
        journal = Journal(Path(directory) / "numbers.jsonl", identity)
    found = broadcast_object_list([journal.read() if journal else []])[0]
    try:
        done = {record["time"]: TimeRecord(**record) for record in found}
    except (KeyError, TypeError) as error:
        raise TrainingError(f"numbers.jsonl in {directory} holds no numbers per time: {error}; remove it") from error
    network = network.to(accelerator.device).eval()
    for number, t in enumerate(grid.tolist()):
        if t not in done or not (meter is None or meter.recall(t, directory)):
            block = blocks[number % len(blocks)]
            done[t], means = _measure_at(network, source, block, t, batch_size, seed, accelerator, meter)
            if meter is not None:
                meter.note(t, means, directory if accelerator.is_main_process else None)
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
    meter: SpectrumMeter | None = None,
) -> tuple[TimeRecord, dict[str, Tensor]]:
    process = ForwardProcess(network.schedule)
    columns: list[Tensor] = []
    powers: dict[str, Tensor] = {}
    mine = chosen.tensor_split(accelerator.num_processes)[accelerator.process_index]
    for index in mine.split(batch_size):
        x_0 = source.x_0(index).to(accelerator.device)
        noise = batch_noise(seed, index.tolist(), 0, x_0.shape[1:]).to(x_0)
        x_t = process.diffuse(x_0, t, noise)
        condition = {name: value.to(x_0.device) for name, value in condition_of(source, index).items()}
        output = network.features(x_t, t, **condition)
        ask = network.prediction_from if meter is None else network.predict_from
        prediction = ask(output, x_t, t)
        squares = (mean_square(prediction.noise), mean_square(noise - prediction.noise), mean_square(noise))
        columns.append(torch.stack([*squares, *velocity_squares(prediction, x_0, noise)]))
        if meter is not None:
            times = torch.full((len(index),), t, dtype=torch.float64)
            for name, power in meter.sums(Example(prediction, x_0, noise, times, process)).items():
                powers[name] = powers[name] + power if name in powers else power
    per_image = torch.cat(columns, 1) if columns else torch.zeros(5, 0, dtype=torch.float64, device=accelerator.device)
    moments = _reduced(per_image, accelerator)
    count = len(chosen)
    means = {
        name: accelerator.reduce(power.to(accelerator.device), "sum").cpu() / count for name, power in powers.items()
    }
    return _record(t, count, *moments), means


def velocity_squares(prediction: Prediction, x_0: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """u^2 - u_hat^2 and (u - u_hat)^2 of the velocity u, averaged over pixels, (B,) each, float64."""
    known, predicted = prediction.in_unit("velocity", x_0, noise), prediction.in_unit("velocity")
    return mean_square(known) - mean_square(predicted), mean_square(known - predicted)


def _reduced(per_image: Tensor, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Sums (n,) and sums of products (n, n) over the images of all processes, of (n, images)."""
    n = len(per_image)
    sums = torch.cat([per_image.sum(1), (per_image @ per_image.mT).flatten()])
    total: Tensor = accelerator.reduce(sums, "sum").cpu()
    return total[:n], total[n:].reshape(n, n)


def _record(t: float, count: int, sums: Tensor, products: Tensor) -> TimeRecord:
    """Means and standard errors; Gamma_t without the luck of the noise at hand, whose mean square is 1 on average."""
    if not bool(sums.isfinite().all() and products.isfinite().all()):
        raise TrainingError(f"the network returned NaN or infinity at time {t}; check its weights and its precision")
    mean = sums / count
    spread = products / count - mean[:, None] * mean
    share = float(spread[0, 2] / spread[2, 2]) if float(spread[2, 2]) > 0 and count > 2 else 0.0
    gamma = float((mean[0] - share * (mean[2] - 1)).clamp(min=0.0))
    variances = torch.stack([spread[0, 0] - share * spread[0, 2], spread[1, 1]]).clamp(min=0.0)
    errors = (variances / max(1, count - 1)).sqrt()
    in_velocity = (float(mean[3].clamp(min=0.0)), float(mean[4]))
    return TimeRecord(t, count, gamma, float(errors[0]), float(mean[1]), float(errors[1]), *in_velocity)


def chosen_images(source: Source, count: int, seed: int) -> Tensor:
    """Positions of randomly chosen images. The choice depends on the seed; more images include fewer."""
    if count < 2:
        raise TrainingError(f"{count} images are too few for a standard error; use 2 or more")
    return torch.randperm(len(source), generator=step_generator(seed, "measure", 0))[:count]


def image_blocks(source: Source, count: int, seed: int, most: int) -> list[Tensor]:
    """Positions of images in blocks of `count` that share no image, at most `most` blocks."""
    blocks = max(1, min(most, len(source) // max(count, 1)))
    chosen = chosen_images(source, count, seed) if blocks == 1 else chosen_images(source, blocks * count, seed)
    return list(chosen.tensor_split(blocks))


def smoothed(numbers: NumbersPerTime, schedule: Schedule) -> NumbersPerTime:
    """Smooth each number by a parabola over its neighbours.

    The kernel is Gaussian, and as wide as two spacings of the noise levels. Errors stay those of single times, which
    are larger.
    """
    levels = noise_levels(schedule, numbers.times)
    width = SMOOTHING * float(levels.diff().median()) if len(levels) > 1 else 0.0
    if len(levels) < FEWEST_SMOOTHED or numbers.mean_square_residual is None:
        return numbers
    gamma = local_fit(levels, numbers.mean_square_noise, levels, width, degree=2).clamp(min=0.0)
    logs = local_fit(levels, numbers.mean_square_residual.clamp(min=1e-30).log(), levels, width, degree=2)
    changed = {"mean_square_noise": gamma, "mean_square_residual": logs.exp()}
    if numbers.velocity_variance is not None and numbers.velocity_residual is not None:
        variance = local_fit(levels, numbers.velocity_variance, levels, width, degree=2).clamp(min=0.0)
        logs = local_fit(levels, numbers.velocity_residual.clamp(min=1e-30).log(), levels, width, degree=2)
        changed |= {"velocity_variance": variance, "velocity_residual": logs.exp()}
    return replace(numbers, **changed)


def numbers_per_time(records: Iterable[TimeRecord]) -> NumbersPerTime:
    """Turn records into the numbers per time that a bundle stores."""
    ordered = sorted(records, key=lambda record: record.time)
    measured = [*_MEASURED, *(name for name in _IN_VELOCITY if all(getattr(r, name) is not None for r in ordered))]
    columns = {name: [getattr(record, name) for record in ordered] for name in measured}
    return _as_numbers({"times": [record.time for record in ordered], **columns})


def interpolation_error(numbers: NumbersPerTime, schedule: Schedule, name: str) -> float:
    """Estimate the largest absolute error of interpolating these numbers between their times.

    Every second time is left out and interpolated from its neighbours. The error of linear interpolation grows with the
    square of the spacing. So a quarter of the error seen there remains for the whole grid.
    """
    if len(numbers.times) < 3:
        raise TrainingError(f"{len(numbers.times)} times are too few to judge an interpolation; measure at 3 or more")
    levels = -schedule.log_snr(numbers.times).numpy()
    values = numbers.tensors()[name].numpy()
    guess = np.interp(levels[1:-1:2], levels[0::2], values[0::2])
    return float(np.abs(guess - values[1:-1:2]).max() / 4)


def binned(samples: Mapping[str, Tensor], schedule: Schedule) -> NumbersPerTime:
    """Numbers per time from single samples at random times, pooled in bins of the log-SNR.

    samples: "time", "mean_square_noise" and "mean_square_residual", (n,) each, as the fit of heads gathers them. Also
    "velocity_variance" and "velocity_residual", if they are known.
    """
    level = (-schedule.log_snr(samples["time"])).clamp(-FARTHEST, FARTHEST)
    low, high = float(level.min()), float(level.max())
    bin_of = ((level - low) / max(high - low, 1e-12) * BINS).long().clamp(max=BINS - 1)
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
