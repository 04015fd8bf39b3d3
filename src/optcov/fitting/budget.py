"""How many network evaluations a fit makes, what they cost here, and how a budget of them is shared out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from optcov.fitting import hidden
from optcov.fitting.batches import batch_count
from optcov.fitting.config import TrainingError
from optcov.fitting.settings import FitSettings
from optcov.processes import accelerator

if TYPE_CHECKING:
    from optcov.fitting.fit import FitPlan

LEAST = 256  # evaluations
LEAST_TIMES = 16
LEAST_CALIBRATION = 192  # samples: fewer leave a tenth of the times without any
BATCH = 64  # of the calibration


@final
@dataclass(frozen=True)
class Share:
    """What a fit does within a budget."""

    images: int
    times: int
    measure_images: int
    calibration_samples: int


def share_out(settings: FitSettings, times: int) -> Share:
    """The settings' own shares, all scaled to the number of evaluations that they ask for.

    Below a quarter of the usual budget there are fewer times, too, with more images each.
    """
    own = Share(settings.images, times, settings.measure_images, settings.calibration_samples)
    if not settings.evaluations:
        return own
    if settings.evaluations < LEAST:
        raise TrainingError(f"evaluations = {settings.evaluations} are too few for a fit; use {LEAST} or more")
    factor = settings.evaluations / (own.images + own.times * own.measure_images + own.calibration_samples)
    fewer = min(times, max(LEAST_TIMES, round(times * min(1.0, 4 * factor))))
    per_time = int(factor * times * own.measure_images / fewer)
    samples = int(factor * own.calibration_samples) // BATCH * BATCH
    images = max(1, int(factor * own.images) // settings.batch_size) * settings.batch_size
    measured = max(2, per_time) if own.measure_images else 0
    return Share(images, fewer, measured, samples if samples >= LEAST_CALIBRATION else 0)


def evaluations(plan: FitPlan) -> int:
    """Network evaluations of a plan, counted in images; those of heads that train by steps included."""
    settings, count = plan.settings, 1  # to see that it runs, and the shape of its features
    if plan.tasks:
        steps = batch_count(settings.images, settings.batch_size) if plan.closed_form else settings.steps
        count += steps * settings.batch_size
    count += len(plan.grid) * min(settings.measure_images, len(plan.train))
    if plan.test is not None and plan.calibrated:
        count += batch_count(settings.calibration_samples, BATCH) * BATCH
    return count


@final
@dataclass(frozen=True)
class FitEstimate:
    """What a fit will take, from a batch that was timed here."""

    evaluations: int
    seconds: float  # of the network
    bytes: int  # of features that are kept between the passes of a closed-form fit
    cut: bool = False  # whether these are a window of each image, because whole ones do not fit
    hidden_steps: int = 0  # in which hidden layers train on these, without the network

    def __str__(self) -> str:
        minutes = self.seconds / 60
        span = f"{minutes:.0f} minutes" if minutes >= 2 else f"{self.seconds:.0f} seconds"
        kept = f", and keeps {self.bytes / 1e9:.2g} GB of features in memory" if self.bytes else ""
        more = " (a window of each image: whole ones do not fit)" if self.cut else ""
        trained = f"; then trains hidden layers for {self.hidden_steps:,} steps" if self.hidden_steps else ""
        return f"makes {self.evaluations:,} network evaluations, about {span} on this machine{kept}{more}{trained}"


@torch.no_grad()
def estimate(plan: FitPlan, cache_bytes: int) -> FitEstimate:
    """Time the second of two batches."""
    network, batch = plan.bundle.network.to(accelerator().device).eval(), plan.batches(1).to(accelerator().device)
    seconds = 0.0
    for _ in range(2):
        began = time.monotonic()
        output = network.features(batch.x_0, batch.times, **batch.condition)
        features = output.output if output.features is None else output.features
        float(features.flatten()[0])  # waits for the device
        seconds = time.monotonic() - began
    each = features.nbytes // len(batch.x_0)
    wanted = each * plan.settings.images if plan.closed_form else 0
    count = evaluations(plan)
    return FitEstimate(
        count,
        seconds / len(batch.x_0) * count,
        min(cache_bytes, wanted),
        plan.closed_form and wanted > cache_bytes,
        hidden.STEPS if plan.tasks and plan.settings.kind == "deep" else 0,
    )
