"""Peers: diffusers' own schedulers as samplers of our networks.

They keep their own choice of times (diffusers' t is our t - 1) and their own formulas. But they get our float64
alpha_bar, because their float32 values are off by up to 7e-4 in a step at small times. A network of the VP SDE is put
on a discrete schedule, by matching alpha_bar.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from optcov.noise import image_generator
from optcov.prediction import Network, Prediction, check_condition
from optcov.schedule import Schedule
from optcov.solvers.result import SolverResult, check_start
from optcov.watch import FiniteWatch


@final
@dataclass(frozen=True)
class Peer:
    """A scheduler of diffusers with its settings."""

    scheduler: str  # its class in diffusers
    stochastic: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    clips: bool = False  # whether it can clip x0_hat to a range
    fixed_stride: bool = False  # whether it steps by N // K, whatever its list of times says


_DPM_SOLVER = {
    "timestep_spacing": "linspace",
    "lambda_min_clipped": -5.1,  # its authors' value: the end of a cosine schedule is unstable without it
}

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "DPM-Solver++": Peer("DPMSolverMultistepScheduler", False, {"algorithm_type": "dpmsolver++", **_DPM_SOLVER}),
        "SDE-DPM-Solver++": Peer(
            "DPMSolverMultistepScheduler", True, {"algorithm_type": "sde-dpmsolver++", **_DPM_SOLVER}
        ),
        "UniPC": Peer("UniPCMultistepScheduler", False, {"timestep_spacing": "linspace"}),
        "DPM-Solver++, Karras times": Peer(
            "DPMSolverMultistepScheduler",
            False,
            {"algorithm_type": "dpmsolver++", "use_karras_sigmas": True, **_DPM_SOLVER},
        ),
        "UniPC, Karras times": Peer(
            "UniPCMultistepScheduler", False, {"timestep_spacing": "linspace", "use_karras_sigmas": True}
        ),
        "DDPM (diffusers)": Peer("DDPMScheduler", True, {"timestep_spacing": "linspace"}, clips=True),
        # with "leading" times it would start from pure noise at a time where there is signal left
        "DDIM (diffusers)": Peer(
            "DDIMScheduler", False, {"timestep_spacing": "trailing"}, clips=True, fixed_stride=True
        ),
    }
)


@torch.no_grad()
def peer(
    name: str,
    network: Network,
    schedule: Schedule,
    start: Tensor,
    steps: int,
    seed: int = 0,
    *,
    indices: Sequence[int] | None = None,
    data_range: tuple[float, float] | None = None,
    condition: Mapping[str, Tensor] | None = None,
) -> SolverResult:
    """Sample by a diffusers scheduler from start (B, *D), noise at the last time, in `steps` calls.

    data_range: clip x0_hat to it, if the scheduler can (DDPM, DDIM).
    """
    scheduler = make_scheduler(name, schedule, steps, data_range)
    # one generator per image, drawn from in the order of the steps: its noise does not depend on the batch
    generators = [image_generator(seed, image, 1) for image in check_start(start, indices)]
    noise = {"generator": generators} if PEERS[name].stochastic else {}
    watch, x, condition = FiniteWatch(start), start, check_condition(condition, len(start))
    for t in scheduler.timesteps.tolist():
        prediction = Prediction.of(network(x, t + 1, **condition), x, t + 1, *schedule.levels(t + 1))
        x = scheduler.step(prediction.noise.to(x.dtype), t, x, **noise).prev_sample
        watch.note(x, t + 1)
    watch.require_finite()
    return SolverResult(x, torch.full((len(x),), len(scheduler.timesteps)))


def make_scheduler(name: str, schedule: Schedule, steps: int, data_range: tuple[float, float] | None = None) -> Any:
    """Build a diffusers scheduler with our alpha_bar, and set its times."""
    import diffusers

    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; choose one of {'; '.join(PEERS)}")
    if not schedule.discrete:
        raise ValueError(
            f"diffusers' schedulers have discrete times, got {schedule!r}; match the network to a discrete "
            f"schedule first"
        )
    row = PEERS[name]
    _check_steps(name, row, schedule.grid_size, steps)
    options = {**row.options, "num_train_timesteps": schedule.grid_size, "trained_betas": schedule.betas.tolist()}
    if row.clips:
        options.update(clip_options(data_range))
    scheduler = getattr(diffusers, row.scheduler)(**options)
    use_alpha_bar(scheduler, schedule)
    with warnings.catch_warnings():  # diffusers hands tensors to numpy in a way that newer versions of it deprecate
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        try:
            scheduler.set_timesteps(steps)
        except AssertionError as error:  # Karras times among noise levels that its table does not tell apart
            raise ValueError(
                f"diffusers' {name} has no {steps} times on {schedule!r}; choose another method"
            ) from error
    return scheduler


def use_alpha_bar(scheduler: Any, schedule: Schedule) -> None:
    """Replace a scheduler's float32 alpha_bar by our float64 one, wherever the scheduler keeps it."""
    scheduler.alphas_cumprod = schedule.alpha_bar(schedule.full_grid())
    for name in ("one", "final_alpha_cumprod"):  # its alpha_bar at time 0
        if hasattr(scheduler, name):
            setattr(scheduler, name, torch.ones((), dtype=torch.float64))


def _check_steps(name: str, row: Peer, N: int, steps: int) -> None:
    if steps != int(steps) or not 2 <= steps <= N:
        raise ValueError(f"steps = {steps} is outside 2..{N}, the times of this schedule")
    if row.fixed_stride and N % steps:
        divisors = [k for k in range(2, N + 1) if N % k == 0]
        near = sorted(sorted(divisors, key=lambda k: abs(k - steps))[:2])
        raise ValueError(
            f"{name!r} steps by a fixed stride, so steps = {steps} must divide {N}; take "
            f"{' or '.join(map(str, near))}, or our own DDIM, which takes any number"
        )


def clip_options(data_range: tuple[float, float] | None) -> dict[str, Any]:
    """The scheduler options that clip x0_hat to a range."""
    if data_range is None:
        return {"clip_sample": False}
    low, high = data_range
    if low != -high:
        raise ValueError(
            f"diffusers clips to a range around 0 only, but data_range is {data_range}; pass None or (-b, b)"
        )
    return {"clip_sample": True, "clip_sample_range": float(high)}
