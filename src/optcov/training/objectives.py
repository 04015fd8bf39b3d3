"""Objectives: modules that turn a batch into a loss per sample, (B,), averaged over pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from optcov.forward import ForwardProcess
from optcov.gaussian import weighted_sum
from optcov.networks import BackboneOutput, HeadedNetwork
from optcov.training.batches import Batch
from optcov.training.config import TrainingError
from optcov.training.losses import gamma_deviance, noise_loss, squared_error
from optcov.training.targets import HeadTask, Regression, Situation

LOSSES = ("gamma", "mse")


@final
class NoiseObjective(nn.Module):
    """Stage 1: the squared error of what the network predicts: the noise (Eq. 7), the clean image or the velocity."""

    def __init__(self, network: HeadedNetwork):
        super().__init__()
        self.network = network
        self.process = ForwardProcess(network.schedule)

    def forward(self, batch: Batch) -> Tensor:
        """Loss per sample."""
        x_t = self.process.diffuse(batch.x_0, batch.times, batch.noise)
        output = self.network.features(x_t, batch.times, **batch.condition).output
        return squared_error(self._target(batch), output) / batch.noise[0].numel()

    def _target(self, batch: Batch) -> Tensor:
        schedule, kind = self.network.schedule, self.network.parameterisation
        if kind == "epsilon":
            return batch.noise
        if kind == "sample":
            return batch.x_0
        signal, noise = schedule.alpha_bar(batch.times).sqrt(), schedule.beta_bar(batch.times).sqrt()
        return weighted_sum(signal, batch.noise, -noise, batch.x_0)


@final
class HeadObjective(nn.Module):
    """Stage 2: heads on a frozen backbone, all from one forward pass without gradient (Algorithms 1 and 2).

    The backbone is in eval mode whatever the mode of the objective; dropout=True is the paper's way, which leaves it
    in train mode and so adds the noise of dropout to the residuals.
    """

    def __init__(
        self, network: HeadedNetwork, tasks: Mapping[str, HeadTask], loss: str = "gamma", dropout: bool = False
    ):
        super().__init__()
        _check_loss(loss, tasks)
        network.requires_grad_(False)  # also heads that it has already, which are not trained
        for task in tasks.values():
            task.module.requires_grad_(True)
        self.network, self.loss, self.dropout = network, loss, dropout
        self.tasks = dict(tasks)
        self.modules_by_name = nn.ModuleDict({name: task.module for name, task in tasks.items()})
        self.process = ForwardProcess(network.schedule)
        self.train()

    def train(self, mode: bool = True) -> HeadObjective:
        """Switch the heads; the backbone stays in eval mode unless dropout is asked for."""
        super().train(mode)
        self.network.backbone.train(mode and self.dropout)
        return self

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the heads' losses per sample."""
        with torch.no_grad():
            situation, output = look(self.network, self.process, batch)
        # torch crashes in the gradient of a group normalisation of channels-last inputs that need none themselves
        output = replace(output, features=output.features.contiguous())
        return head_losses(self.tasks, situation, output, self.loss)


@final
class JointObjective(nn.Module):
    """Mean and heads from scratch together: the noise loss, plus a weight times the heads' losses.

    Gradients of the heads reach the backbone's features, but not the eps_hat inside their targets.
    """

    def __init__(
        self, network: HeadedNetwork, tasks: Mapping[str, HeadTask], loss: str = "gamma", head_weight: float = 0.01
    ):
        super().__init__()
        _check_loss(loss, tasks)
        self.network, self.loss, self.head_weight = network, loss, head_weight
        self.tasks = dict(tasks)
        self.modules_by_name = nn.ModuleDict({name: task.module for name, task in tasks.items()})
        self.process = ForwardProcess(network.schedule)

    def forward(self, batch: Batch) -> Tensor:
        """Loss per sample."""
        situation, output = look(self.network, self.process, batch)
        noise = self.network.noise_from(output, situation.x_t, batch.times)
        mean_loss = noise_loss(batch.noise, noise) / batch.noise[0].numel()
        return mean_loss + self.head_weight * head_losses(self.tasks, situation, output, self.loss)


def look(network: HeadedNetwork, process: ForwardProcess, batch: Batch) -> tuple[Situation, BackboneOutput]:
    """One forward pass of the backbone: what the targets may look at, and what the heads read."""
    x_t = process.diffuse(batch.x_0, batch.times, batch.noise)
    output = network.features(x_t, batch.times, **batch.condition)
    predicted = network.noise_from(output, x_t, batch.times).detach()
    return Situation(batch, x_t, predicted, process, network), output


def head_losses(tasks: Mapping[str, HeadTask], situation: Situation, output: BackboneOutput, loss: str) -> Tensor:
    """Sum of the heads' losses per sample, averaged over pixels."""
    total = torch.zeros(len(situation.x_t), device=situation.x_t.device)
    for task in tasks.values():
        with torch.no_grad():
            regression = task.target(situation)
        total = total + _head_loss(task, regression, situation, output, loss)
    return total / situation.x_t[0].numel()


def _head_loss(
    task: HeadTask, regression: Regression, situation: Situation, output: BackboneOutput, loss: str
) -> Tensor:
    head, log_snr = task.module, situation.log_snr
    raw = head.mix(head.last(head.inputs(output.features, output.time_embedding)), log_snr)
    weight = regression.weight.to(raw.device, raw.dtype)
    if task.estimator == "range" or head.transform == "exp":
        # the learned range has one loss only, the variational one
        log_g = regression.log_estimate(head.log_base(log_snr, situation.predicted) + head.squash(raw))
        if loss == "gamma" or task.estimator == "range":
            return weight * gamma_deviance(regression.target, log_g)
        return weight * squared_error(regression.target, log_g.exp())
    return weight * squared_error(regression.target, raw)


def _check_loss(loss: str, tasks: Mapping[str, HeadTask]) -> None:
    if loss not in LOSSES:
        raise TrainingError(f"unknown loss {loss!r} of the heads; choose one of {', '.join(LOSSES)}")
    for name, task in tasks.items():
        wrong = loss == "gamma" and name != "range" and task.module.transform != "exp"
        if wrong or (name == "range" and task.module.transform != "linear"):
            needed = "linear" if name == "range" else "exp"
            raise TrainingError(f"the head {name!r} with loss {loss!r} needs the output transform {needed!r}")
