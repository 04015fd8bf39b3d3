"""The probability flow solved to a tolerance: what solvers with fixed steps are compared with."""

from __future__ import annotations

import torch

from optcov.solvers.reverse_sde import ReverseDynamics, check_end_time


@torch.no_grad()
def adaptive_flow(network, schedule, start, tolerance=1e-5, end_time=None, denoise=True):
    """x_0 (B, *D) by torchdiffeq from start, x at the final time."""
    from torchdiffeq import odeint

    dynamics, final_time = ReverseDynamics(network, schedule, start), schedule.final_time
    end_time = check_end_time(end_time, schedule)
    times = torch.tensor([0.0, final_time - end_time], dtype=torch.float64)

    def slope(elapsed, x):
        # time runs down, torchdiffeq's up; it may end an ulp below end_time
        return dynamics.ode_slope(x, min(max(final_time - float(elapsed), end_time), final_time))

    x = odeint(slope, start, times, rtol=tolerance, atol=tolerance, method="dopri5")[-1]
    return dynamics.ended(x, end_time, torch.zeros(len(x)), denoise).x_0
