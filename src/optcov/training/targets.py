"""What each head learns: a head is a triple of module, target function and estimator.

    head     target y              log g           estimator    paper
    sn       eps^2                 log h           "sn"         Eq. 9
    npr      (eps - eps_hat)^2     log g           "npr"        Eq. 15
    range    lam2 + gamma^2 e      low..high       "range"      Improved DDPM

with e = (x_0 - x0_hat)^2. The variational loss of the learned range, KL(q(x_s | x_t, x_0) || p(x_s | x_t)) with the
mean detached, is 1/2 (y / sigma^2 + log sigma^2) up to a constant, and log sigma^2 = middle + half_width * v is linear
in v: so all three are one regression, of y on g with log g = offset + slope * output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess, range_ends
from optcov.gaussian import per_sample
from optcov.networks import HeadedNetwork
from optcov.networks.heads import Head
from optcov.training.batches import Batch


@final
@dataclass(frozen=True)
class Situation:
    """What a target function may look at; a target with a derivative of the backbone runs the network itself."""

    batch: Batch
    x_t: Tensor  # (B, *D)
    predicted: Tensor  # eps_hat, (B, *D), without gradient
    forward: ForwardProcess
    network: HeadedNetwork

    @property
    def log_snr(self) -> Tensor:
        """Of each sample, (B,), float32."""
        return self.forward.schedule.log_snr(self.batch.times).to(self.x_t.device, torch.float32)


@final
@dataclass(frozen=True)
class Regression:
    """Regress y on g, where log g = offset + slope * output of the head; weight 0 leaves a sample out."""

    target: Tensor  # y, (B, *D)
    offset: Tensor  # (B,), float64
    slope: Tensor  # (B,), float64
    weight: Tensor  # (B,), float64

    @staticmethod
    def plain(target: Tensor) -> Regression:
        """log g = raw, for every sample."""
        zero = torch.zeros(len(target), dtype=torch.float64)
        return Regression(target, zero, zero + 1, zero + 1)

    def log_estimate(self, output: Tensor) -> Tensor:
        """log g, (B, *D), by the logarithm of a head's output, or by a linear output itself."""
        return per_sample(self.offset, output) + per_sample(self.slope, output) * output


TargetFunction = Callable[[Situation], Regression]


@final
@dataclass(frozen=True)
class HeadTask:
    """A head with what it learns, and the name of the estimator that uses it."""

    module: Head
    target: TargetFunction
    estimator: str


def sn_target(situation: Situation) -> Regression:
    """eps^2 (Eq. 9)."""
    return Regression.plain(situation.batch.noise.square())


def npr_target(situation: Situation) -> Regression:
    """(eps - eps_hat)^2 (Eq. 15)."""
    return Regression.plain((situation.batch.noise - situation.predicted).square())


def range_target(situation: Situation) -> Regression:
    """The second moment of x_s about the detached mean, one step (1, or 1/1000 of continuous time) down.

    In continuous time the last step starts anywhere between one and two steps, and samples below are left out: between
    0 and one step beta-tilde(s | t) goes to 0, and its logarithm with it.
    """
    forward, times = situation.forward, situation.batch.times
    unit = 1 if forward.schedule.steps else 1e-3
    usable = times >= unit
    t = torch.where(usable, times, 2 * torch.full_like(times, unit))
    s = torch.where(t >= 2 * unit, t - unit, torch.zeros_like(t))
    bridge = forward.bridge(t, s)
    low, high = range_ends(forward, t, s)
    # x_0 - x0_hat = -sqrt(beta_bar / alpha_bar) (eps - eps_hat)
    scale = bridge.clean_weight.square() * torch.exp(-forward.schedule.log_snr(t))
    residual = (situation.batch.noise - situation.predicted).square()
    target = per_sample(bridge.variance, residual) + per_sample(scale, residual) * residual
    return Regression(target, (high + low) / 2, (high - low) / 2, usable.double())


TARGETS: dict[str, TargetFunction] = {"sn": sn_target, "npr": npr_target, "range": range_target}


def head_task(name: str, module: Head) -> HeadTask:
    """The task of a head by its name."""
    if name not in TARGETS:
        raise ValueError(f"unknown head {name!r}; choose among {', '.join(TARGETS)}")
    return HeadTask(module, TARGETS[name], estimator=name)
