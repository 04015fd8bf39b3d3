"""Calibration of a head: whether the mean that it predicts equals the mean of its target.

The target is the squared noise, or the squared residual. Both are in the unit of the head, by part of the times, and
before clamping. A report shows another comparison: the variance of x_0 in the steps against the squared error of the
mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from optcov.covariances import Example, of_head
from optcov.fitting.batches import Batches, batch_count
from optcov.fitting.config import TrainingError
from optcov.fitting.heads import HeadTask
from optcov.fitting.objectives import observe
from optcov.forward import ForwardProcess
from optcov.networks import HeadedNetwork
from optcov.prediction import Source


@final
@dataclass(frozen=True)
class Calibration:
    """Means over images, noise and pixels, in each part of the times."""

    edges: Tensor  # times between the parts, (parts + 1,)
    predicted: Tensor  # mean of the head, (parts,)
    measured: Tensor  # mean of its target, (parts,)
    error: Tensor  # standard error of predicted / measured, (parts,)

    @property
    def ratio(self) -> Tensor:
        """predicted / measured, (parts,); 1 means calibrated."""
        return self.predicted / self.measured

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values for a record."""
        names = ("edges", "predicted", "measured", "ratio", "error")
        return {name: [float(f"{value:.6g}") for value in getattr(self, name).tolist()] for name in names}


@torch.no_grad()
def calibrate(
    network: HeadedNetwork,
    source: Source,
    heads: Sequence[str],
    samples: int = 2048,
    parts: int = 10,
    batch_size: int = 64,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Calibration]:
    """Compare heads with their targets on held-out data. All heads share each evaluation.

    Times are drawn as in training.
    source: the data. Its `condition(index)`, if it has one, gives the network's further inputs.
    progress: a function that is called after each batch, with the batches done and the batches in all.
    """
    for head in heads:
        if head not in network.heads or not of_head(head).has_posterior:
            raise TrainingError(f"calibration is defined for heads of the network that estimate a moment, not {head!r}")
    tasks = {head: HeadTask(network.heads[head], of_head(head)) for head in heads}  # type: ignore[arg-type]
    network.eval()
    process = ForwardProcess(network.schedule)
    batches = Batches(source, network.schedule, batch_size, seed)
    device = next(network.parameters()).device
    times: list[Tensor] = []
    pairs: dict[str, list[Tensor]] = {head: [] for head in heads}  # predicted and measured, (2, B) each
    count = batch_count(samples, batch_size)
    for number in range(1, count + 1):
        batch = batches(number).to(device)
        example, output = observe(network, process, batch)
        prediction = network.predict_from(output, example.prediction.x_t, batch.times)
        times.append(batch.times.double())
        for head, task in tasks.items():
            both = (prediction.heads[head], _measured(task, example))
            pairs[head].append(torch.stack([values.flatten(1).mean(1, dtype=torch.float64).cpu() for values in both]))
        if progress is not None:
            progress(number, count)
    final = network.schedule.final_time
    pooled = {}
    for head, found in pairs.items():
        predicted, measured = torch.cat(found, 1)
        pooled[head] = _pool(torch.cat(times), predicted, measured, final, parts)
    return pooled


def _measured(task: HeadTask, example: Example) -> Tensor:
    """What a head should say on average; where its own target has both signs, the squared residual."""
    if task.module.about == "prediction" or task.covariance.target_can_be_negative:
        return example.residual(task.module.unit).square()
    return task.regression(example).target


def _pool(times: Tensor, predicted: Tensor, measured: Tensor, final_time: float, parts: int) -> Calibration:
    edges = torch.linspace(0, final_time, parts + 1, dtype=torch.float64)
    part_of = (times / final_time * parts).ceil().long().clamp(1, parts) - 1
    columns = []
    for part in range(parts):
        p, m = predicted[part_of == part], measured[part_of == part]
        if len(p) < 2:
            raise TrainingError(
                f"no more than {len(p)} samples fell into part {part + 1} of the times; use more samples"
            )
        ratio = p.mean() / m.mean()
        error = (p - ratio * m).std() / len(p) ** 0.5 / m.mean()  # of a ratio of means, to first order
        columns.append(torch.stack([p.mean(), m.mean(), error]))
    means = torch.stack(columns)
    return Calibration(edges, means[:, 0], means[:, 1], means[:, 2])
