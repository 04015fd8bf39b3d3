"""Stage 2: heads on a frozen backbone (Algorithms 1 and 2), in closed form or by gradient descent.

`fit_closed_form` fits the last layer of each head by streaming sums, and gathers the numbers per time on the way.
`train_heads` trains whole heads by AdamW. Both fit all heads from the same forward pass of the backbone, which runs in
eval mode and without gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, final

import numpy as np
import torch
from torch import Tensor

from optcov import processes
from optcov.bundle import NumbersPerTime
from optcov.fitting.batches import Batches, batch_count, condition_entry, step_generator
from optcov.fitting.closed_form import FitReport, Reduce, fit_gamma, fit_least_squares, log_estimate
from optcov.fitting.config import TrainingConfig, TrainingError
from optcov.fitting.heads import HeadTask
from optcov.fitting.hidden import train_hidden_layers
from optcov.fitting.loop import Score, StepRecord, Training
from optcov.fitting.measure import FARTHEST, binned, velocity_squares
from optcov.fitting.objectives import HeadObjective, check_loss, needs_probe, observe
from optcov.fitting.rows import Rows, cut, kernel_edge, window_side
from optcov.forward import ForwardProcess
from optcov.gaussian import mean_square
from optcov.networks import Head, HeadedNetwork, TimedHead, fingerprint

Progress = Callable[[int, int], None]  # batches done in this pass over the data, and batches of a pass
CACHE_BYTES = 2**31  # of features and targets that are kept between passes
GAIN_PARTS = 20  # equal parts of the times, each with a gain of its own


@final
@dataclass(frozen=True)
class HeadFit:
    """The result of a closed-form fit of heads."""

    heads: Mapping[str, Head]
    reports: Mapping[str, FitReport]
    numbers: NumbersPerTime  # from the samples that the heads were fitted on, pooled in bins of the log-SNR


@final
class FeatureStream:
    """The features of a frozen backbone, batch after batch; every pass gives the same.

    The first pass runs the backbone, and keeps the rows for later passes: whole images if they fit into cache_bytes,
    else windows of images. Heads of one stream share the inputs of their last layers, so their normalisations must be
    equal.
    """

    def __init__(
        self,
        network: HeadedNetwork,
        tasks: Mapping[str, HeadTask],
        batches: Batches,
        count: int,
        cache_bytes: int = CACHE_BYTES,
        progress: Progress | None = None,
    ):
        self.network, self.tasks, self.batches, self.count = network.eval(), tasks, batches, count
        self.cache_bytes, self.progress = cache_bytes, progress
        self.accelerator = processes.accelerator()
        if batches.batch_size % self.accelerator.num_processes:
            raise TrainingError(
                f"a batch of {batches.batch_size} cannot be shared by {self.accelerator.num_processes} processes evenly"
            )
        numbers = ("mean_square_noise", "mean_square_residual", "velocity_variance", "velocity_residual")
        recorded = ("time", *numbers, *(f"scale of {name}" for name in tasks))
        self.samples: dict[str, list[Tensor]] = {name: [] for name in recorded}
        self._process = ForwardProcess(network.schedule)
        self._kept: list[Rows] = []
        self.side: int | None = None  # of the windows of positions that are kept; None: whole images
        _check_shared_inputs(tasks)

    def __call__(self) -> Iterator[Rows]:
        """One pass."""
        for number in range(1, self.count + 1):
            if number > len(self._kept):
                self._kept.append(self._rows(number))
            yield self._kept[number - 1]
            if self.progress is not None:
                self.progress(number, self.count)

    @torch.no_grad()
    def _rows(self, number: int) -> Rows:
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.batches(number).part(rank, processes).to(self.accelerator.device)
        example, output = observe(self.network, self._process, batch, needs_probe(self.tasks))
        head = next(iter(self.tasks.values())).module
        deep = _hidden(head)  # hidden layers train later, on what they see
        inputs = head.inputs(output.features, output.time_embedding, hidden=not deep)
        regressions = {name: task.regression(example) for name, task in self.tasks.items()}
        rows = Rows(inputs, batch.times, example.log_snr, regressions)
        self.samples["time"].append(batch.times)
        self.samples["mean_square_noise"].append(mean_square(example.prediction.noise))
        self.samples["mean_square_residual"].append(mean_square(batch.noise - example.prediction.noise))
        for known, values in zip(
            ("velocity_variance", "velocity_residual"),
            velocity_squares(example.prediction, batch.x_0, batch.noise),
            strict=True,
        ):
            self.samples[known].append(values)
        for name, task in self.tasks.items():
            self.samples[f"scale of {name}"].append(task.scale(example, regressions[name]))
        return self._cut(rows, number)

    def _cut(self, rows: Rows, number: int) -> Rows:
        """As much of the rows as there is room for."""
        edge = kernel_edge(next(iter(self.tasks.values())).module.last)
        images = len(rows.times)
        if number == 1:
            budget = self.cache_bytes / (self.count * images)
            self.side = window_side(rows.inputs.shape[1:], edge, rows.nbytes // images, budget)
        if self.side is None:
            return rows
        if _hidden(next(iter(self.tasks.values())).module):
            raise TrainingError(
                f"hidden layers train on the features of whole images, and there is room for those of "
                f"{self.cache_bytes * images // rows.nbytes}; use fewer images, or kind timed"
            )
        generator = step_generator(self.batches.seed, "window", number)
        places = torch.rand(self.batches.batch_size, 2, generator=generator)
        own = places.tensor_split(self.accelerator.num_processes)[self.accelerator.process_index]
        return cut(rows, self.side, edge, own)

    def train_hidden_layers(self, heads: Mapping[str, TimedHead]) -> None:
        """Train the heads' hidden layers on the kept features, and then keep the outputs of these layers instead."""
        if len(self._kept) < self.count:
            deque(self(), maxlen=0)
        train_hidden_layers(self._kept, heads, self.accelerator, self.batches.seed, self.progress)
        hidden = next(iter(heads.values())).hidden
        assert hidden is not None
        for number, rows in enumerate(self._kept):  # one by one: twice the memory would be too much
            self._kept[number] = replace(rows, inputs=hidden(rows.inputs))

    def scale_at(self, name: str, log_snr: Tensor) -> Tensor:
        """The typical size of a head's target at noise levels (n,), float64, interpolated in its logarithm."""
        pooled = self._pooled()
        scales = binned({**pooled, "mean_square_residual": pooled[f"scale of {name}"]}, self.network.schedule)
        assert scales.mean_square_residual is not None
        levels = -self.network.schedule.log_snr(scales.times).numpy()
        logs = scales.mean_square_residual.clamp(min=1e-12).log().numpy()
        return torch.as_tensor(np.interp(-log_snr.cpu().numpy(), levels, logs)).exp()

    def numbers(self) -> NumbersPerTime:
        """The numbers per time, from the samples of a pass."""
        return binned(self._pooled(), self.network.schedule)

    def _pooled(self) -> dict[str, Tensor]:
        """What the first pass recorded, over all processes; runs one if there was none yet."""
        if len(self._kept) < self.count:
            deque(self(), maxlen=0)
        own = {name: torch.cat(parts).to(self.accelerator.device) for name, parts in self.samples.items()}
        return {name: self.accelerator.gather(values).cpu() for name, values in own.items()}


def fit_closed_form(
    network: HeadedNetwork,
    tasks: Mapping[str, HeadTask],
    batches: Batches,
    images: int = 4096,
    loss: str = "gamma",
    time_weighted: bool = False,
    progress: Progress | None = None,
) -> HeadFit:
    """Fit the last layer of each head on about this many images.

    loss: "gamma" is Gamma regression with a log link, by Fisher scoring. "mse" is the paper's mean squared error, by
    its normal equations. The learned range has its own loss, and is always fitted by Fisher scoring.
    time_weighted: for "mse", divide the error at each time by the square of the mean target at this time.
    """
    check_loss(loss)
    if time_weighted and loss != "mse":
        raise TrainingError(
            'only the loss "mse" is weighted by time: "gamma" weighs errors relative to g already; leave time_weighted '
            "out, or fit with paper_exact=True (--paper-exact)"
        )
    if images < 1:
        raise TrainingError(f"heads cannot be fitted on {images} images")
    before = fingerprint(network.backbone)
    count = batch_count(images, batches.batch_size)
    stream = FeatureStream(network, tasks, batches, count, CACHE_BYTES, progress)
    device = stream.accelerator.device
    network.to(device)

    def reduce(total: Tensor) -> Tensor:
        summed: Tensor = stream.accelerator.reduce(total.to(device), "sum")
        return summed.cpu()

    heads = {name: task.module.to(device).eval() for name, task in tasks.items()}
    squared = {name: head for name, head in heads.items() if loss == "mse" and tasks[name].covariance.has_posterior}
    scored = {name: head for name, head in heads.items() if name not in squared}
    timed = {name: head for name, head in heads.items() if isinstance(head, TimedHead)}
    reports: dict[str, FitReport] = {}
    with torch.no_grad():
        if squared:
            weights = _time_weights(stream, squared) if time_weighted else None
            reports.update(fit_least_squares(stream, squared, weights, reduce))
        if timed:
            set_scales(stream, timed)
        if any(head.hidden is not None for head in timed.values()):
            stream.train_hidden_layers(timed)
        if scored:
            reports.update(fit_gamma(stream, scored, reduce=reduce))
        if timed:
            set_gains(stream, timed, reduce)
    assert fingerprint(network.backbone) == before, "the frozen backbone changed"
    return HeadFit(heads, {name: reports[name] for name in tasks}, stream.numbers())


def train_heads(
    network: HeadedNetwork,
    tasks: Mapping[str, HeadTask],
    batches: Batches,
    config: TrainingConfig,
    directory: Path,
    loss: str = "gamma",
    dropout: bool = False,
    identity: Mapping[str, Any] | None = None,
    score: Score | None = None,
) -> Iterator[StepRecord]:
    """Train whole heads by AdamW, or resume training. At the end the heads hold their averaged weights.

    score: scores the heads of each checkpoint. The heads end with the averaged weights of the best checkpoint.
    """
    before = fingerprint(network.backbone)
    objective = HeadObjective(network, tasks, loss, dropout)
    trained: dict[str, Any] = {"trained heads": sorted(tasks), "loss": loss, "dropout": dropout}
    if (told := condition_entry(batches.source)) is not None:
        trained["condition"] = told
    identity = {**(identity or {}), **network.identity(heads=()), **trained}
    yield from Training(objective, batches, config, directory, identity, score).run()
    assert fingerprint(network.backbone) == before, "the frozen backbone changed"


def set_scales(stream: FeatureStream, heads: Mapping[str, TimedHead]) -> None:
    """Give timed heads the mean size of their target at each noise level, from a pass over the data."""
    for name, head in heads.items():
        head.log_scale.copy_(stream.scale_at(name, -head.scale_levels.double()).clamp(min=1e-12).log())


def set_gains(stream: FeatureStream, heads: Mapping[str, TimedHead], reduce: Reduce) -> None:
    """Give timed heads the gain that makes the mean of g equal the mean target, in equal parts of the times.

    Fisher scoring makes y / g one on average. This is the same only if the model is right.
    """
    sums = {name: torch.zeros(GAIN_PARTS, 4, dtype=torch.float64) for name in heads}
    final = stream.network.schedule.final_time
    for rows in stream():
        part = (rows.times / final * GAIN_PARTS).ceil().long().clamp(1, GAIN_PARTS) - 1
        for name, head in heads.items():
            raw = head.mix(rows.inner(head.last(rows.inputs)), rows.log_snr)
            log_g = log_estimate(head, rows, rows.regressions[name], raw)
            means = [log_g.exp().flatten(1).mean(1), rows.regressions[name].target.flatten(1).mean(1)]
            level = rows.log_snr.clamp(-FARTHEST, FARTHEST)  # infinite where no signal is left
            columns = torch.stack([*means, level, torch.ones_like(level)], dim=1).cpu().double()
            # samples that are left out of the regression, such as probes where no signal is left, have no target
            sums[name].index_add_(0, part, rows.regressions[name].weight.cpu()[:, None] * columns)
    for name, head in heads.items():
        total = reduce(sums[name])
        total = total[total[:, 3] > 0]
        total = total[total[:, 1] > 0]  # where targets of both signs cancel, nothing is known of the mean
        if not len(total):
            continue
        levels, gains = (-total[:, 2] / total[:, 3]).numpy(), (total[:, 1] / total[:, 0]).log().numpy()
        head.log_gain.copy_(torch.as_tensor(np.interp(head.scale_levels.double().cpu().numpy(), levels, gains)))


def _time_weights(stream: FeatureStream, heads: Mapping[str, Head]) -> dict[str, Callable[[Tensor], Tensor]]:
    """1 / m_t^2 by head, m_t the mean target at time t; that of the squared noise is 1 at every time."""
    schedule = stream.network.schedule

    def weight(name: str) -> Callable[[Tensor], Tensor]:
        if stream.tasks[name].covariance.about == "prediction":
            return lambda times: torch.ones(len(times), dtype=torch.float64)
        return lambda times: stream.scale_at(name, schedule.log_snr(times)).clamp(min=1e-12) ** -2

    return {name: weight(name) for name in heads}


def _hidden(head: Head) -> TypeGuard[TimedHead]:
    return isinstance(head, TimedHead) and head.hidden is not None


def _check_shared_inputs(tasks: Mapping[str, HeadTask]) -> None:
    """Heads share a stream if all but their last layers are equal."""
    bodies = {name: _body(task.module) for name, task in tasks.items()}
    first = next(iter(bodies.values()))
    for name, body in bodies.items():
        if body.keys() != first.keys() or not all(torch.equal(p, first[key]) for key, p in body.items()):
            raise TrainingError(
                f"the head {name!r} reads the features in a way of its own, so that it cannot be fitted together with "
                f"the others; fit it alone, or train it by gradient descent"
            )


def _body(head: Head) -> dict[str, Tensor]:
    last = {id(parameter) for parameter in head.last.parameters()}
    return {name: p for name, p in head.named_parameters() if id(p) not in last}
