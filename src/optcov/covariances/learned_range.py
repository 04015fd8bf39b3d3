"""Improved DDPM: log sigma^2 of a step interpolates between log beta-tilde and log beta by the network's v in [-1, 1].

It says nothing of x_0 given x_t: of all covariances it alone overrides the step.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from optcov.covariances.base import Bounds, Covariance, Example, Regression, Row
from optcov.forward import Bridge, ForwardProcess, first_step_variance
from optcov.gaussian import ClampCounts, CovarianceShape, Diagonal, Gaussian, Isotropic, per_sample
from optcov.prediction import Prediction


@final
class LearnedRange(Covariance):
    """The learned range. Trained networks keep to it by themselves; what lies outside is clamped and counted."""

    name = "range"
    head = "range"
    structure = "range"
    has_posterior = False
    only_eta = 1.0
    rows = (Row("Improved DDPM", 1.0),)

    def __init__(self, last_variance: Tensor | None = None):
        self.last_variance = last_variance  # the lower end at s = 0, where beta-tilde is 0: that of (1 | 2)

    def bound_to(self, forward: ForwardProcess) -> Covariance:
        """Learn the lower end of the last step from the schedule."""
        super().bound_to(forward)
        return LearnedRange(first_step_variance(forward.schedule))

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        raise ValueError(
            'covariance "range" is defined for a step from t to s and says nothing of x_0 given x_t; '
            'use "npr" or "sn" for posterior()'
        )

    def posterior(self, prediction: Prediction, bounds: Bounds) -> Gaussian:
        """The mean alone; places outside the range are counted."""
        v = prediction.heads["range"]
        bounds.moved = bounds.moved + ClampCounts(below=(v < -1).sum(), above=(v > 1).sum(), total=v.numel())
        return Gaussian(bounds.clip(prediction.clean), Isotropic(torch.zeros((), dtype=torch.float64)))

    def step(self, prediction: Prediction, posterior: Gaussian, bridge: Bridge, anchor: Tensor) -> Gaussian:
        """The mean as for all, the variance between the ends of the range."""
        assert self.last_variance is not None, "bound_to was not called"
        low, high = (end.log() for end in range_ends(bridge, prediction.spread.square(), self.last_variance))
        v = prediction.heads["range"]
        share = (v.clamp(-1, 1) + 1) / 2
        log_variance = share * per_sample(high, v) + (1 - share) * per_sample(low, v)
        return Gaussian(bridge.apply(posterior, anchor).mean, Diagonal(log_variance.exp(), nonnegative=True))

    @classmethod
    def regression(cls, example: Example, unit: str) -> Regression:
        """The second moment of x_s about the detached mean, one small step down, as Improved DDPM's own loss has it.

        KL(q(x_s | x_t, x_0) || p(x_s | x_t)) with the mean detached is 1/2 (y / sigma^2 + log sigma^2) up to a
        constant, and log sigma^2 is linear in v: a regression of y on sigma^2. With real times the last step starts
        anywhere between one and two small steps. Samples below are left out: there log beta-tilde goes to minus
        infinity.
        """
        forward, times, small = example.forward, example.times, example.forward.schedule.small_step
        usable = times >= small
        t = torch.where(usable, times, 2 * torch.full_like(times, small))
        s = torch.where(t >= 2 * small, t - small, torch.zeros_like(t))
        bridge, schedule = forward.bridge(t, s), forward.schedule
        low, high = (end.log() for end in range_ends(bridge, schedule.beta_bar(t), first_step_variance(schedule)))
        residual = (example.x_0 - example.prediction.clean).square()
        scale = bridge.clean_weight.square()
        target = per_sample(bridge.variance, residual) + per_sample(scale, residual) * residual
        return Regression(target, (high + low) / 2, (high - low) / 2, usable.double())


def range_ends(bridge: Bridge, beta_bar: Tensor, last_variance: Tensor) -> tuple[Tensor, Tensor]:
    """beta-tilde and beta of a step from noise power beta_bar, () or (B,); at s = 0 last_variance for beta-tilde."""
    low = torch.where(bridge.variance > 0, bridge.variance, last_variance)
    return low, bridge.variance + bridge.clean_weight.square() * beta_bar
