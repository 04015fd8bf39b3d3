"""The probability flow ODE: fixed Euler steps as in the paper's table, or adaptive ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optcov.prediction import Network
from optcov.schedule import Schedule
from optcov.solvers.result import SolverResult, check_start
from optcov.solvers.reverse_sde import Grid, ReverseDynamics, check_end_time
from optcov.watch import bad_value_message, not_finite


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
    """Solve the ODE by Euler steps from start, x at the final time (B, *D), with `steps` evaluations.

    denoise: spend the last evaluation on the posterior mean at end_time. convention: "exact", or "score_sde"
    for the steps of the paper's table (see `Grid`).
    """
    check_start(start)
    dynamics = ReverseDynamics(network, schedule, start, data_range, condition)
    return dynamics.euler(
        start, Grid(steps, schedule.final_time, check_end_time(end_time, schedule), denoise, convention)
    )


@torch.no_grad()
def probability_flow_adaptive(
    network: Network,
    schedule: Schedule,
    start: Tensor,
    *,
    relative_tolerance: float = 1e-5,
    absolute_tolerance: float = 1e-5,
    method: str = "dopri5",
    end_time: float | None = None,
    denoise: bool = True,
    data_range: tuple[float, float] | None = None,
    condition: Mapping[str, Tensor] | None = None,
) -> SolverResult:
    """Solve the ODE by torchdiffeq from start, x at the final time (B, *D), with steps as long as the tolerances allow.

    The batch shares its step sizes, so a sample depends on its neighbours within the tolerances. method: one
    of torchdiffeq's adaptive ones.
    """
    from torchdiffeq import odeint

    check_start(start)
    dynamics = ReverseDynamics(network, schedule, start, data_range, condition)
    if not (relative_tolerance > 0 and absolute_tolerance > 0):
        raise ValueError(
            f"tolerances must be positive, got relative_tolerance={relative_tolerance}, "
            f"absolute_tolerance={absolute_tolerance}; score_sde uses 1e-5 for both"
        )
    final_time, end_time = schedule.final_time, check_end_time(end_time, schedule)
    times = torch.tensor([0.0, final_time - end_time], dtype=torch.float64, device=start.device)
    evaluations = 0

    def slope(elapsed: Tensor, x: Tensor) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        # time runs down, torchdiffeq's up; its float32 may end an ulp below end_time
        t = min(max(final_time - float(elapsed), end_time), final_time)
        value = dynamics.ode_slope(x, t)
        bad = not_finite(value)
        if bool(bad.any()):  # step sizes are chosen on the host anyway
            raise ValueError(bad_value_message(evaluations, t, bad.nonzero().flatten().tolist()))
        return value

    x: Tensor = odeint(slope, start, times, rtol=relative_tolerance, atol=absolute_tolerance, method=method)[-1]
    return dynamics.ended(x, end_time, torch.full((len(x),), evaluations), denoise)
