"""The reverse VP SDE and its probability flow, as a noise-predicting network gives them (Song et al. 2020).

With score = -eps_hat / sqrt(beta_bar), going down by dt > 0:

    SDE   dx = beta (x / 2 - eps_hat / sqrt(beta_bar)) dt + sqrt(beta) dw
    ODE   dx = beta / 2 (x - eps_hat / sqrt(beta_bar)) dt
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
from optcov.prediction import Network
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule, Time, VPSchedule

END_TIME = 1e-3  # where score_sde stops: below, the score is too steep to follow
CONVENTIONS = ("exact", "score_sde")


@final
class ReverseSDE:
    """Right-hand sides of both equations; data_range clips the last, denoised image only.

    condition: what else the network takes by name, each a tensor with one entry per sample.
    """

    def __init__(
        self,
        network: Network,
        schedule: Schedule,
        data_range: tuple[float, float] | None = None,
        condition: Mapping[str, Tensor] | None = None,
    ):
        if not isinstance(schedule, VPSchedule):
            raise ValueError(f"this solver reverses the VP SDE and needs Schedule.vp_sde(), got {schedule!r}")
        self.schedule, self.condition = schedule, dict(condition or {})
        self._process = ReverseProcess(network, ForwardProcess(schedule), "beta_tilde", data_range)

    def sde_slope(self, x: Tensor, t: Time) -> Tensor:
        """Drift of the reverse SDE per unit of time going down, (B, *D)."""
        return per_sample(self.schedule.beta(t), x) * (x / 2 - self._scaled_noise(x, t))

    def ode_slope(self, x: Tensor, t: Time) -> Tensor:
        """Slope of the probability flow per unit of time going down, (B, *D)."""
        return per_sample(self.schedule.beta(t) / 2, x) * (x - self._scaled_noise(x, t))

    def diffusion(self, t: Time) -> Tensor:
        """sqrt(beta), () or (B,)."""
        return self.schedule.beta(t).sqrt()

    def denoised(self, x: Tensor, t: Time) -> Tensor:
        """The posterior mean E[x_0 | x_t], (B, *D)."""
        prediction = self._process.predict(x, t, **self.condition)
        return self._process.bounds.clip(prediction.clean)

    def among(self, rows: Tensor) -> ReverseSDE:
        """The same for some of the samples."""
        condition = {name: value[rows.to(value.device)] for name, value in self.condition.items()}
        return ReverseSDE(self._process.network, self.schedule, self._process.data_range, condition)

    def _scaled_noise(self, x: Tensor, t: Time) -> Tensor:
        noise = self._process.predict(x, t, **self.condition).noise
        return noise.to(x.dtype) / per_sample(self.schedule.beta_bar(t).sqrt(), x)


@final
@dataclass(frozen=True)
class Grid:
    """A fixed number of network evaluations on the way from time 1 to end_time.

    "exact": Euler steps between evenly spaced times that end at end_time, where with `denoise` the last
    evaluation gives the posterior mean. "score_sde": that code's steps, all of size 1 / K, from K times that
    end at end_time; with `denoise` the last of them shows its mean. They differ by a factor (K - 1) / K in
    the step size, and in the last step, which at small K is far too long in the second.
    """

    steps: int  # K, network evaluations
    end_time: float = END_TIME
    denoise: bool = True
    convention: str = "exact"

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            raise ValueError(f"convention = {self.convention!r} is not one of {', '.join(CONVENTIONS)}")
        fewest = 2 if self.denoise or self.convention == "score_sde" else 1
        if self.steps != int(self.steps) or self.steps < fewest:
            raise ValueError(f"steps = {self.steps} is not an integer of at least {fewest}")
        check_end_time(self.end_time)

    @property
    def posterior_mean_last(self) -> bool:
        """Whether the last evaluation is not an Euler step but a denoising one."""
        return self.denoise and self.convention == "exact"

    def moves(self) -> list[tuple[float, float, float]]:
        """Euler steps as (time, next time, step size)."""
        if self.convention == "score_sde":
            times = torch.linspace(1.0, self.end_time, self.steps, dtype=torch.float64).tolist()
            return [(t, s, 1 / self.steps) for t, s in zip(times, [*times[1:], 0.0], strict=True)]
        count = self.steps if self.denoise else self.steps + 1
        times = torch.linspace(1.0, self.end_time, count, dtype=torch.float64).tolist()
        return [(t, s, t - s) for t, s in pairwise(times)]


def check_end_time(end_time: float) -> float:
    """Refuse a time to stop at that is not between the ends of the SDE."""
    if not 0 < end_time < 1:
        raise ValueError(f"end_time = {end_time} is outside (0, 1); score_sde stops at {END_TIME}")
    return end_time
