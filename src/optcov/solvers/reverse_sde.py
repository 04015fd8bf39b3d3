"""The reverse VP SDE, and the probability flow of any schedule with real times (Song et al. 2020).

Going down by dt > 0, with x_t = a x_0 + b eps and, for the SDE, score = -eps_hat / b:

    SDE   dx = beta (x / 2 - eps_hat / b) dt + sqrt(beta) dw
    ODE   dx = -(a' x0_hat + b' eps_hat) dt
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess
from optcov.gaussian import per_sample
from optcov.prediction import Network, take
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule, Time

CONVENTIONS = ("exact", "score_sde")


class ProbabilityFlow:
    """Right-hand side of the ODE; data_range clips the last, denoised image only.

    condition: what else the network takes by name, each a tensor with one entry per sample.
    """

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        data_range: tuple[float, float] | None = None,
        condition: Mapping[str, Tensor] | None = None,
    ):
        schedule.require_real_times("the probability flow")
        self.schedule, self.condition = schedule, dict(condition or {})
        self._process = ReverseProcess(network, ForwardProcess(schedule), "beta_tilde", data_range)

    def ode_slope(self, x: Tensor, t: Time) -> Tensor:
        """Slope of the probability flow per unit of time going down, (B, *D)."""
        of_clean, of_noise = self.schedule.level_rates(t)
        slope = self._process.predict(x, t, **self.condition).combined(-of_clean, -of_noise)
        return slope.to(x.dtype)

    def denoised(self, x: Tensor, t: Time) -> Tensor:
        """The posterior mean E[x_0 | x_t], (B, *D)."""
        prediction = self._process.predict(x, t, **self.condition)
        return self._process.bounds.clip(prediction.clean)


@final
class ReverseSDE(ProbabilityFlow):
    """Right-hand side of the SDE, too, for the VP SDE alone."""

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        data_range: tuple[float, float] | None = None,
        condition: Mapping[str, Tensor] | None = None,
    ):
        schedule.beta(schedule.final_time)  # refuses what is no VP SDE
        super().__init__(network, schedule, data_range, condition)

    def sde_slope(self, x: Tensor, t: Time) -> Tensor:
        """Drift of the reverse SDE per unit of time going down, (B, *D)."""
        return per_sample(self.schedule.beta(t), x) * (x / 2 - self._scaled_noise(x, t))

    def diffusion(self, t: Time) -> Tensor:
        """sqrt(beta), () or (B,)."""
        return self.schedule.beta(t).sqrt()

    def among(self, rows: Tensor) -> ReverseSDE:
        """The same for some of the samples."""
        process = self._process
        return ReverseSDE(process.network, self.schedule, process.data_range, take(self.condition, rows))

    def _scaled_noise(self, x: Tensor, t: Time) -> Tensor:
        noise = self._process.predict(x, t, **self.condition).noise
        return noise.to(x.dtype) / per_sample(self.schedule.beta_bar(t).sqrt(), x)


@final
@dataclass(frozen=True)
class Grid:
    """A fixed number of network evaluations on the way from the final time to end_time.

    "exact": Euler steps between evenly spaced times that end at end_time, where with `denoise` the last
    evaluation gives the posterior mean. "score_sde": that code's steps, all of size 1 / K, from K times that
    end at end_time; with `denoise` the last of them shows its mean. They differ by a factor (K - 1) / K in
    the step size, and in the last step, which at small K is far too long in the second.
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
        """Whether the last evaluation is not an Euler step but a denoising one."""
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
    """The time to stop at: a small step above 0, as score_sde has it, since below the score is too steep to follow."""
    if end_time is None:
        return schedule.small_step
    if not 0 < end_time < schedule.final_time:
        raise ValueError(
            f"end_time = {end_time} is outside (0, {schedule.final_time:g}); score_sde stops at {schedule.small_step:g}"
        )
    return end_time
