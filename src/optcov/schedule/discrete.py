"""Schedules with discrete times 0..N."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from optcov.schedule.base import Schedule, Time, as_times, check_signal_left, first_of, remembered


@final
class DiscreteSchedule(Schedule):
    """Times 0..N with alpha_bar_n = prod (1 - beta_i). A last beta of 1 leaves no signal at N: zero terminal SNR."""

    name = "betas"
    discrete = True
    first_time = small_step = 1

    def __init__(self, betas: Tensor):
        if betas.ndim != 1 or len(betas) == 0:
            raise ValueError(f"betas must be a non-empty one-dimensional sequence, got shape {tuple(betas.shape)}")
        blind = len(betas) > 1 and float(betas[-1]) == 1
        outside = ~((betas > 0) & (betas < 1))
        outside[-1] &= not blind  # a last beta of 1 leaves no signal: zero terminal SNR
        if bool(outside.any()):
            n = int(outside.nonzero()[0])
            raise ValueError(
                f"betas[{n}] = {float(betas[n])} is outside (0, 1); a beta is the share of noise added in one step, "
                f"so clip the sequence to that interval (cosine schedules use at most 0.999)"
            )
        self.grid_size = len(betas)
        self.final_time = float(self.grid_size)
        self.argument_scale = 1000 / self.grid_size
        self._betas = betas.double()
        zero = torch.zeros(1, dtype=torch.float64)
        self._log_alpha_bar = torch.cat([zero, torch.log1p(-self._betas).cumsum(0)])
        self._log_beta_bar = torch.log(-torch.expm1(self._log_alpha_bar))
        check_signal_left(float(self._log_alpha_bar[-2 if blind else -1]), "betas")
        flat = self._log_alpha_bar.exp().diff() >= 0
        if bool(flat.any()):
            n = int(flat.nonzero()[0])
            raise ValueError(f"betas[{n}] = {float(betas[n])} is too small to change alpha_bar; drop that step")

    @property
    def betas(self) -> Tensor:
        """beta_1..beta_N, as a copy: the levels that follow from them do not change any more."""
        return self._betas.clone()

    @property
    def steps(self) -> int:
        """N."""
        return self.grid_size

    @remembered
    def check_times(self, t: Time) -> Tensor:
        # not in the default dtype, which may be a half precision that merges neighbouring times
        times = as_times(t, None if isinstance(t, Tensor) else torch.float64).detach()
        if times.ndim > 1:
            raise ValueError(f"times must be a number or a (B,) tensor, got shape {tuple(times.shape)}")
        if times.is_floating_point() and bool((times != times.round()).any()):
            raise ValueError(
                f"time {first_of(times, times != times.round())} is not an integer; this schedule has the times "
                f"0..{self.grid_size} (use Schedule.vp_sde() for real times)"
            )
        outside = (times < 0) | (times > self.final_time)
        if bool(outside.any()):
            raise ValueError(
                f"time {first_of(times, outside)} is outside this schedule; use times from 0 to {self.grid_size}"
            )
        return times.long()

    def grid(self, numbers: Iterable[int]) -> list[float]:
        return list(numbers)

    def number(self, t: float) -> float:
        return t

    def nearest(self, t: Tensor) -> Tensor:
        return t.round().long().clamp(1, self.grid_size)

    def quantile(self, share: Tensor) -> Tensor:
        return 1 + (share * self.grid_size).long().clamp(max=self.grid_size - 1)

    def stream(self, t: float) -> int:
        return int(t)

    def time_at(self, log_snr: Tensor) -> Tensor:
        log_alpha_bar = -torch.nn.functional.softplus(-log_snr)  # of every variance-preserving schedule
        levels = self._log_alpha_bar.numpy()
        return torch.as_tensor(np.interp(-log_alpha_bar.numpy(), -levels, np.arange(len(levels), dtype=np.float64)))

    def settings(self) -> dict[str, Any]:
        return {"betas": self.betas.tolist()}

    def spec(self) -> dict[str, Any]:
        """By the name of its family, if it is one of the known ones."""
        for name, build in (("linear", Schedule.linear), ("cosine", Schedule.cosine)):
            for options in ({"scale": True}, {"scale": False}) if name == "linear" else ({},):
                try:
                    candidate = build(self.grid_size, **options)
                except ValueError:  # a family need not exist for every number of steps: 1000 / steps can exceed 50
                    continue
                if torch.equal(candidate.betas, self.betas):
                    return {"kind": name, "steps": self.grid_size, **options}
        return super().spec()

    def log_alpha_bar(self, t: Time) -> Tensor:
        return self._log_alpha_bar[self.check_times(t)].clone()  # one time gives a view of the table

    def log_beta_bar(self, t: Time) -> Tensor:
        return self._log_beta_bar[self.check_times(t)].clone()

    def __repr__(self) -> str:
        return (
            f"DiscreteSchedule(steps={self.grid_size}, betas={float(self.betas[0]):.3g}..{float(self.betas[-1]):.3g})"
        )
