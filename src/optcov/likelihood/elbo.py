"""Minus the variational bound along a trajectory (Eq. 3), as named terms per image.

    -ELBO = prior + sum over steps of transitions + reconstruction  >=  -log p(x_0)

Each term is defined in `terms`. The table of costs uses the same definitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.likelihood.discretised import check_cdf
from optcov.likelihood.terms import (
    NoiseByTime,
    check_images,
    check_last_variance,
    check_stochastic,
    observe,
    prior_cost,
    reconstruction_cost,
    seeded_noise,
    transition_cost,
)
from optcov.networks.guidance import refuse_guided
from optcov.noise import image_numbers
from optcov.prediction import check_condition
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule
from optcov.trajectory import Trajectory


@final
@dataclass(frozen=True)
class ElboTerms:
    """The terms of -ELBO per image, in nats summed over pixels, float64."""

    prior: Tensor  # KL(q(x_T | x_0) || p(x_T)), (B,)
    transitions: Tensor  # KL of each step by ascending s: s = tau_1 .. tau_(K-1), (B, K - 1)
    reconstruction: Tensor  # -log p(x_0 | x_tau_1), (B,)
    dimensions: int  # pixels times channels

    @property
    def total(self) -> Tensor:
        """-ELBO in nats, (B,)."""
        return self.prior + self.transitions.sum(1) + self.reconstruction

    def bits_per_dim(self) -> Tensor:
        """-ELBO in bits per dimension, (B,)."""
        return self.total / (self.dimensions * math.log(2))


@torch.no_grad()
def elbo(
    process: ReverseProcess,
    x_0: Tensor,
    trajectory: Trajectory,
    noise: NoiseByTime | None = None,
    last_variance: str = "paper",
    cdf: str = "exact",
    *,
    condition: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    images: Sequence[int] | None = None,
) -> ElboTerms:
    """Score images x_0 (B, *D) along a trajectory that ends at the schedule's final time.

    noise: a callable t -> (B, *D), the noise that takes x_0 to x_t. By default the noise depends on (seed, image
    number, t) alone.
    images: the image numbers, by default 0..B-1. Pass them to make the result independent of the batch.
    condition: further inputs of the network by name, each a tensor with one entry per image.
    last_variance: the variance of p(x_0 | x_tau_1). "paper" is beta-tilde(1|2). "own" is the covariance's own, but at
    least the variance of rounding to 8 bits. "reference_table" reproduces the authors' tables of costs.
    cdf: "exact", or "tanh", which is the authors' approximation.

    A process without data_range is scored by a plain Gaussian density at the last step.

    >>> from optcov import ForwardProcess, Schedule, oracle
    >>> schedule = Schedule.linear()
    >>> data = oracle.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.01, 0.01])
    >>> process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "npr", data_range=None)
    >>> terms = elbo(process, data.sample(4), Trajectory.even(schedule, 10))
    >>> terms.transitions.shape, terms.bits_per_dim().shape
    (torch.Size([4, 9]), torch.Size([4]))
    """
    if not isinstance(process, ReverseProcess) or not isinstance(trajectory, Trajectory):
        raise ValueError(
            f"got a {type(process).__name__} and a {type(trajectory).__name__}; pass a ReverseProcess and a Trajectory"
        )
    if noise is not None and not callable(noise):
        raise ValueError(f"noise is a {type(noise).__name__}; pass a function t -> tensor, or None to draw it")
    check_last_variance(last_variance)
    check_cdf(cdf)
    check_stochastic(process.forward)
    refuse_guided(process.given_network)
    check_ends_at_final_time(trajectory, process.forward.schedule)
    check_images(x_0, process.data_range)
    condition = check_condition(condition, len(x_0))
    numbers = image_numbers(images, len(x_0))
    process = process.for_images(seed, numbers)
    if noise is None:
        noise = seeded_noise(process.forward.schedule, seed, numbers, x_0.shape[1:], x_0.dtype)
    transitions: list[Tensor] = []
    for t, s in trajectory.descending():
        seen = observe(process, x_0, t, noise(t), condition)
        if s > 0:
            transitions.insert(0, transition_cost(process, seen, s))
    return ElboTerms(
        prior=prior_cost(process.forward, x_0),
        transitions=torch.stack(transitions, 1) if transitions else x_0.new_zeros(len(x_0), 0, dtype=torch.float64),
        reconstruction=reconstruction_cost(process, seen, last_variance, cdf),
        dimensions=x_0[0].numel(),
    )


def check_ends_at_final_time(trajectory: Trajectory, schedule: Schedule) -> None:
    """Refuse a trajectory that does not end at the schedule's final time."""
    if trajectory.times[-1] != schedule.final_time:
        raise ValueError(
            f"a bound needs a trajectory that ends at the schedule's final time {schedule.final_time:g}, but this one "
            f"ends at {trajectory.times[-1]:g}; append {schedule.final_time:g}"
        )
