"""Objectives: modules that turn a batch into a loss per sample, (B,), averaged over pixels.

    noise      |eps - eps_hat|^2                                       Eq. 7
    sn         |eps^2 - h|^2                                           Eq. 9, Algorithm 1
    npr        |(eps - eps_hat)^2 - g|^2                               Eq. 15, Algorithm 2
    gamma      sum (y / g + log g), y the target of either head

The minimiser of the last is E[y | x_t] too, but it weighs errors relative to g, as the bound on the likelihood does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from optcov.covariances import Example, Regression
from optcov.covariances.jacobian import probed_diagonal
from optcov.fitting.batches import Batch
from optcov.fitting.config import TrainingError
from optcov.fitting.heads import HeadTask
from optcov.forward import ForwardProcess
from optcov.gaussian import sum_pixels
from optcov.networks import BackboneOutput, HeadedNetwork
from optcov.prediction import output_of

LOSSES = ("gamma", "mse")
HEAD_WEIGHT = 0.01  # of the heads' losses beside the noise loss, where both train together


def squared_error(target: Tensor, estimate: Tensor) -> Tensor:
    """The paper's loss, summed over pixels, (B,)."""
    return sum_pixels((target - estimate).square())


@final
class NoiseObjective(nn.Module):
    """Stage 1: the squared error of what the network predicts: the noise (Eq. 7), the clean image or the velocity."""

    def __init__(self, network: HeadedNetwork):
        super().__init__()
        self.network = network
        self.process = ForwardProcess(network.schedule)

    def forward(self, batch: Batch) -> Tensor:
        x_t = self.process.diffuse(batch.x_0, batch.times, batch.noise)
        output = self.network.features(x_t, batch.times, **batch.condition).output
        levels = self.network.schedule.levels(batch.times)
        target = output_of(self.network.parameterisation, batch.x_0, batch.noise, *levels)
        return squared_error(target, output) / batch.noise[0].numel()


class _OfHeads(nn.Module):
    """A network with the heads that are trained."""

    def __init__(self, network: HeadedNetwork, tasks: Mapping[str, HeadTask], loss: str):
        super().__init__()
        check_loss(loss, tasks)
        self.network, self.tasks, self.loss = network, dict(tasks), loss
        self.modules_by_name = nn.ModuleDict({name: task.module for name, task in tasks.items()})
        self.process = ForwardProcess(network.schedule)


@final
class HeadObjective(_OfHeads):
    """Stage 2: heads on a frozen backbone, all from one forward pass without gradient (Algorithms 1 and 2).

    The backbone is in eval mode whatever the mode of the objective; dropout=True is the paper's way, which leaves it
    in train mode and so adds the noise of dropout to the residuals.
    """

    def __init__(
        self, network: HeadedNetwork, tasks: Mapping[str, HeadTask], loss: str = "gamma", dropout: bool = False
    ):
        super().__init__(network, tasks, loss)
        network.requires_grad_(False)  # also heads that it has already, which are not trained
        self.modules_by_name.requires_grad_(True)
        self.dropout = dropout
        self.train()

    def train(self, mode: bool = True) -> HeadObjective:
        """Switch the heads; the backbone stays in eval mode unless dropout is asked for."""
        super().train(mode)
        self.network.backbone.train(mode and self.dropout)
        return self

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the heads' losses per sample."""
        with torch.no_grad():
            example, output = observe(self.network, self.process, batch, needs_probe(self.tasks))
        # torch crashes in the gradient of a group normalisation of channels-last inputs that need none themselves
        output = replace(output, features=output.features.contiguous())
        return head_losses(self.tasks, example, output, self.loss)


@final
class JointObjective(_OfHeads):
    """Mean and heads from scratch together: the noise loss, plus a weight times the heads' losses.

    Gradients of the heads reach the backbone's features, but not the eps_hat inside their targets.
    """

    def __init__(self, network: HeadedNetwork, tasks: Mapping[str, HeadTask]):
        super().__init__(network, tasks, "gamma")
        if needs_probe(tasks):
            raise TrainingError(
                "heads on probes of the Jacobian need a network that is trained already; fit them later"
            )

    def forward(self, batch: Batch) -> Tensor:
        example, output = observe(self.network, self.process, batch)
        noise = self.network.prediction_from(output, example.prediction.x_t, batch.times).noise
        mean_loss = squared_error(batch.noise, noise) / batch.noise[0].numel()
        return mean_loss + HEAD_WEIGHT * head_losses(self.tasks, example, output, self.loss)


def observe(
    network: HeadedNetwork, process: ForwardProcess, batch: Batch, probe: bool = False
) -> tuple[Example, BackboneOutput]:
    """One forward pass of the backbone: what the targets may look at, without gradient, and what the heads read.

    probe: with a backward pass that probes its Jacobian; what the heads read has no gradient then.
    """
    x_t = process.diffuse(batch.x_0, batch.times, batch.noise)
    if probe:
        return _probe(network, process, batch, x_t)
    output = network.features(x_t, batch.times, **batch.condition)
    prediction = network.prediction_from(output, x_t, batch.times).detach()
    return Example(prediction, batch.x_0, batch.noise, batch.times, process), output


def _probe(
    network: HeadedNetwork, process: ForwardProcess, batch: Batch, x_t: Tensor
) -> tuple[Example, BackboneOutput]:
    assert batch.signs is not None, "this batch was made without signs"
    with torch.enable_grad():
        x_t = x_t.detach().requires_grad_()
        output = network.features(x_t, batch.times, **batch.condition)
        prediction = network.prediction_from(output, x_t, batch.times)
        probe = probed_diagonal(prediction.clean, x_t, [batch.signs.to(prediction.clean.dtype)])
    embedding = None if output.time_embedding is None else output.time_embedding.detach()
    output = BackboneOutput(output.output.detach(), output.features.detach(), embedding)
    return Example(prediction.without_graph(), batch.x_0, batch.noise, batch.times, process, probe), output


def head_losses(tasks: Mapping[str, HeadTask], example: Example, output: BackboneOutput, loss: str) -> Tensor:
    """Sum of the heads' losses per sample, averaged over pixels."""
    x_t = example.prediction.x_t
    total = torch.zeros(len(x_t), device=x_t.device)
    for task in tasks.values():
        with torch.no_grad():
            regression = task.regression(example)
        total = total + _head_loss(task, regression, example, output, loss)
    return total / x_t[0].numel()


def _head_loss(task: HeadTask, regression: Regression, example: Example, output: BackboneOutput, loss: str) -> Tensor:
    head, log_snr = task.module, example.log_snr
    raw = head.mix(head.last(head.inputs(output.features, output.time_embedding)), log_snr)
    weight = regression.weight.to(raw.device, raw.dtype)
    one_loss = not task.covariance.has_posterior  # the learned range has one loss only, the variational one
    if one_loss or head.transform == "exp":
        log_g = regression.log_estimate(head.log_base(log_snr) + head.squash(raw))
        if loss == "gamma" or one_loss:
            return weight * sum_pixels(regression.deviance(log_g))
        return weight * squared_error(regression.target, log_g.exp())
    return weight * squared_error(regression.target, raw)


def needs_probe(tasks: Mapping[str, HeadTask]) -> bool:
    """Whether some head is fitted on probes of the Jacobian."""
    return any(task.covariance.needs_probe for task in tasks.values())


def check_loss(loss: str, tasks: Mapping[str, HeadTask] | None = None) -> None:
    """Refuse a loss that is unknown, or that the output of a head does not fit."""
    if loss not in LOSSES:
        raise TrainingError(f"unknown loss {loss!r} of the heads; choose one of {', '.join(LOSSES)}")
    for name, task in (tasks or {}).items():
        positive = task.covariance.has_posterior and loss == "gamma"
        needed = "exp" if positive else "linear"
        if task.module.transform != needed and (positive or not task.covariance.has_posterior):
            raise TrainingError(f"the head {name!r} with loss {loss!r} needs the output transform {needed!r}")
