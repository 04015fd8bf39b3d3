"""Solvers of the reverse VP SDE, and of the probability flow of any schedule with real times (Song et al. 2020).

Going down by dt > 0, with x_t = a x_0 + b eps and, for the SDE, score = -eps_hat / b:

    SDE   dx = beta (x / 2 - eps_hat / b) dt + sqrt(beta) dw
    ODE   dx = -(a' x0_hat + b' eps_hat) dt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess
from optcov.gaussian import per_sample
from optcov.noise import NoiseSource, StepNoise
from optcov.prediction import Network, Prediction, check_condition, take
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule, Time
from optcov.solvers.result import SolverResult, check_start, noise_source
from optcov.watch import FiniteWatch

CONVENTIONS = ("exact", "score_sde")


@final
class ReverseDynamics:
    """Right-hand sides of the ODE, and for the VP SDE also of the SDE.

    data_range: clips the last image only, if it is denoised.
    condition: further inputs of the network by name, each a tensor with one entry per sample of start (B, *D).
    """

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        start: Tensor,
        data_range: tuple[float, float] | None = None,
        condition: Mapping[str, Tensor] | None = None,
    ):
        self.schedule, self.condition = schedule, check_condition(condition, len(start))
        self._process = ReverseProcess(network, ForwardProcess(schedule), "beta_tilde", data_range)

    def ode_slope(self, x: Tensor, t: Time) -> Tensor:
        """Slope of the probability flow per unit of decreasing time, (B, *D)."""
        of_clean, of_noise = self.schedule.level_rates(t)
        return self._predict(x, t).combined(-of_clean, -of_noise).to(x.dtype)

    def sde_slope(self, x: Tensor, t: Time) -> Tensor:
        """Drift of the reverse SDE per unit of decreasing time, (B, *D)."""
        beta = per_sample(self.schedule.beta(t), x)
        return beta * (x / 2 - self._predict(x, t).noise.to(x.dtype) / per_sample(self.schedule.beta_bar(t).sqrt(), x))

    def diffusion(self, t: Time) -> Tensor:
        """sqrt(beta), () or (B,)."""
        return self.schedule.beta(t).sqrt()

    def among(self, rows: Tensor) -> ReverseDynamics:
        """The same dynamics for some of the samples."""
        other = copy(self)
        other.condition = take(self.condition, rows)
        return other

    def euler(self, start: Tensor, grid: Grid, noise: NoiseSource | None = None) -> SolverResult:
        """Walk from start along the grid by Euler's method. Without noise this solves the ODE, with noise the SDE."""
        watch, x = FiniteWatch(start), start
        for number, (t, s, h) in enumerate(grid.moves(), start=1):
            if noise is None:
                x = x + h * self.ode_slope(x, t)
            else:
                x = x + h * self.sde_slope(x, t)
                if not (grid.denoise and number == grid.steps):
                    x = x + self.diffusion(t) * h**0.5 * noise.draw(number, t, s)
            watch.note(x, t)
        evaluations = torch.full((len(x),), grid.steps - grid.posterior_mean_last)
        found = self.ended(x, grid.end_time, evaluations, grid.posterior_mean_last, watch)
        # score_sde's last step, too, shows a mean
        return replace(found, x_0=self._process.bounds.clip(found.x_0)) if grid.denoise else found

    def ended(
        self, x: Tensor, t: float, evaluations: Tensor, denoise: bool, watch: FiniteWatch | None = None
    ) -> SolverResult:
        """The result of a solver that ended at time t: x itself, or with `denoise` the posterior mean E[x_0 | x_t]."""
        if denoise:
            x, evaluations = self._process.bounds.clip(self._predict(x, t).clean), evaluations + 1
        watch = watch or FiniteWatch(x)
        watch.note(x, t)
        watch.require_finite()
        return SolverResult(x, evaluations)

    def _predict(self, x: Tensor, t: Time) -> Prediction:
        return self._process.predict(x, t, **self.condition)


@final
@dataclass(frozen=True)
class Grid:
    """A fixed number of network evaluations on the way from the final time to end_time.

    "exact": Euler steps between evenly spaced times that end at end_time. With `denoise`, the last evaluation gives the
    posterior mean.
    "score_sde": the steps of that code. All have size 1 / K, and start from K times that end at end_time. With
    `denoise`, the last step shows its mean.
    The step sizes differ by a factor (K - 1) / K. The last step differs, too: at small K it is far too long in
    "score_sde".
    """

    steps: int  # K, network evaluations
    final_time: float
    end_time: float
    denoise: bool = True
    convention: str = "exact"

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            raise ValueError(f"convention = {self.convention!r} is not one of {', '.join(CONVENTIONS)}")
        fewest = 2 if self.denoise or self.convention == "score_sde" else 1
        if self.steps != int(self.steps) or self.steps < fewest:
            raise ValueError(f"steps = {self.steps} is not an integer of at least {fewest}")

    @property
    def posterior_mean_last(self) -> bool:
        """Whether the last evaluation is a denoising step instead of an Euler step."""
        return self.denoise and self.convention == "exact"

    def moves(self) -> list[tuple[float, float, float]]:
        """Euler steps as (time, next time, step size)."""
        if self.convention == "score_sde":
            times = torch.linspace(self.final_time, self.end_time, self.steps, dtype=torch.float64).tolist()
            return [(t, s, self.final_time / self.steps) for t, s in zip(times, [*times[1:], 0.0], strict=True)]
        count = self.steps if self.denoise else self.steps + 1
        times = torch.linspace(self.final_time, self.end_time, count, dtype=torch.float64).tolist()
        return [(t, s, t - s) for t, s in pairwise(times)]


def check_end_time(end_time: float | None, schedule: Schedule) -> float:
    """The time to stop at, by default a small step above 0, as in score_sde. Below it the score is too steep."""
    if end_time is None:
        return schedule.small_step
    if not 0 < end_time < schedule.final_time:
        raise ValueError(
            f"end_time = {end_time} is outside (0, {schedule.final_time:g}); score_sde stops at {schedule.small_step:g}"
        )
    return end_time


@torch.no_grad()
def euler_maruyama(
    network: Network,
    schedule: Schedule,
    start: Tensor,
    steps: int,
    noise: StepNoise | None = None,
    seed: int = 0,
    *,
    indices: Sequence[int] | None = None,
    end_time: float | None = None,
    denoise: bool = True,
    data_range: tuple[float, float] | None = None,
    convention: str = "exact",
    condition: Mapping[str, Tensor] | None = None,
) -> SolverResult:
    """Solve the reverse SDE by x + h drift + sqrt(beta h) z from start = x_1 (B, *D), in `steps` evaluations.

    noise: a callable (t, s) -> (B, *D). By default the noise depends on (seed, image number, step) alone.
    indices: the number of each image.
    end_time: where to stop; by default a small step of the schedule above 0.
    denoise: use the last evaluation for the posterior mean there.
    convention: "exact", or "score_sde" for the steps of the paper's table (see `Grid`).
    condition: further inputs of the network by name, each a tensor with one entry per image.

    >>> from optcov import Schedule, oracle
    >>> schedule = Schedule.vp_sde()
    >>> data = oracle.GaussianMixture([1.0], [[0.0]], [0.25])
    >>> result = euler_maruyama(data.network(schedule), schedule, torch.zeros(2, 1), steps=10)
    >>> result.x_0.shape, result.evaluations.tolist()
    (torch.Size([2, 1]), [10, 10])
    """
    dynamics = ReverseDynamics(network, schedule, start, data_range, condition)
    grid = Grid(steps, schedule.final_time, check_end_time(end_time, schedule), denoise, convention)
    return dynamics.euler(start, grid, noise_source(start, seed, indices, noise))


@torch.no_grad()
def probability_flow(
    network: Network,
    schedule: Schedule,
    start: Tensor,
    steps: int,
    *,
    end_time: float | None = None,
    denoise: bool = True,
    data_range: tuple[float, float] | None = None,
    convention: str = "exact",
    condition: Mapping[str, Tensor] | None = None,
) -> SolverResult:
    """Solve the ODE by Euler steps from start, x at the final time (B, *D), in `steps` evaluations.

    denoise: use the last evaluation for the posterior mean at end_time.
    convention: "exact", or "score_sde" for the steps of the paper's table (see `Grid`).
    """
    check_start(start)
    dynamics = ReverseDynamics(network, schedule, start, data_range, condition)
    return dynamics.euler(
        start, Grid(steps, schedule.final_time, check_end_time(end_time, schedule), denoise, convention)
    )
