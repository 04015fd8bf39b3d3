"""The reverse VP SDE with fixed steps: Euler-Maruyama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optcov.noise import StepNoise
from optcov.prediction import Network
from optcov.schedule import Schedule
from optcov.solvers.result import SolverResult, noise_source
from optcov.solvers.reverse_sde import Grid, ReverseDynamics, check_end_time


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

    noise: callable (t, s) -> (B, *D) instead of that of (seed, image, step). indices: the number of each
    image. end_time: where to stop, by default a small step of the schedule above 0. denoise: spend the last
    evaluation on the posterior mean there. convention: "exact", or
    "score_sde" for the steps of the paper's table (see `Grid`).

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
