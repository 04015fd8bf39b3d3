"""Schedules with real times."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

from optcov.schedule.base import Schedule, Time, check_number, check_signal_left


@final
class VPSchedule(Schedule):
    """dx = -beta(t)/2 x dt + sqrt(beta(t)) dw, so that log alpha_bar = -integral of beta."""

    name = "vp_sde"

    def __init__(self, beta_min: float = 0.1, beta_max: float = 20.0):
        beta_min, beta_max = check_number("beta_min", beta_min), check_number("beta_max", beta_max)
        if not 0 < beta_min <= beta_max < math.inf:
            raise ValueError(f"need 0 < beta_min <= beta_max, got beta_min={beta_min}, beta_max={beta_max}")
        self.beta_min, self.beta_max = beta_min, beta_max
        check_signal_left(-(self.beta_min + self.beta_max) / 2, "beta_max")

    def beta(self, t: Time) -> Tensor:
        """Rate of noise beta(t), () or (B,)."""
        return self.beta_min + self.check_times(t) * (self.beta_max - self.beta_min)

    def level_rates(self, t: Time) -> tuple[Tensor, Tensor]:
        signal, spread = self.levels(t)
        half = self.beta(t) / 2
        return -half * signal, half * signal.square() / spread

    def log_alpha_bar(self, t: Time) -> Tensor:
        times = self.check_times(t)
        return -times * (self.beta_min + times * (self.beta_max - self.beta_min) / 2)

    def log_beta_bar(self, t: Time) -> Tensor:
        return torch.log(-torch.expm1(self.log_alpha_bar(t)))

    def time_at(self, log_snr: Tensor) -> Tensor:
        decay, slope = torch.nn.functional.softplus(-log_snr), self.beta_max - self.beta_min  # decay = -log alpha_bar
        root = torch.sqrt(self.beta_min**2 + 2 * slope * decay)
        return 2 * decay / (self.beta_min + root)  # the quadratic's positive root, in the form without cancellation

    def settings(self) -> dict[str, Any]:
        return {"beta_min": self.beta_min, "beta_max": self.beta_max}


@final
class VESchedule(Schedule):
    """dx = g(t) dw with sigma(t) = sigma_min (sigma_max / sigma_min)^t, so that no signal is lost."""

    name = "ve_sde"
    preserves_variance = False

    def __init__(self, sigma_min: float = 0.01, sigma_max: float = 50.0):
        self.sigma_min, self.sigma_max = _sigmas(sigma_min, sigma_max)

    def log_alpha_bar(self, t: Time) -> Tensor:
        return torch.zeros_like(self.check_times(t))

    def log_beta_bar(self, t: Time) -> Tensor:
        growth = 2 * math.log(self.sigma_max / self.sigma_min)
        return 2 * math.log(self.sigma_min) + torch.log(torch.expm1(growth * self.check_times(t)))

    def time_at(self, log_snr: Tensor) -> Tensor:
        growth = 2 * math.log(self.sigma_max / self.sigma_min)
        return torch.log1p(torch.exp(-log_snr) / self.sigma_min**2) / growth

    def settings(self) -> dict[str, Any]:
        return {"sigma_min": self.sigma_min, "sigma_max": self.sigma_max}


@final
class EDMSchedule(Schedule):
    """x_t = x_0 + t eps: the time is the noise level itself."""

    name = "edm"
    preserves_variance = False
    argument_scale = 1.0

    def __init__(self, sigma_min: float = 0.002, sigma_max: float = 80.0):
        self.first_time, self.final_time = _sigmas(sigma_min, sigma_max)
        self.small_step = self.final_time / self.grid_size

    def log_alpha_bar(self, t: Time) -> Tensor:
        return torch.zeros_like(self.check_times(t))

    def log_beta_bar(self, t: Time) -> Tensor:
        return 2 * torch.log(self.check_times(t))

    def time_at(self, log_snr: Tensor) -> Tensor:
        return torch.exp(-log_snr.double() / 2)

    def settings(self) -> dict[str, Any]:
        return {"sigma_min": self.first_time, "sigma_max": self.final_time}


@final
class FlowSchedule(Schedule):
    """x_t = (1 - t) x_0 + t eps; at t = 1 no signal is left."""

    name = "flow"
    preserves_variance = False
    argument_scale = 1000.0

    def log_alpha_bar(self, t: Time) -> Tensor:
        return 2 * torch.log1p(-self.check_times(t))

    def log_beta_bar(self, t: Time) -> Tensor:
        return 2 * torch.log(self.check_times(t))

    def level_rates(self, t: Time) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(self.check_times(t))
        return -one, one

    def time_at(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr.double() / 2)

    def settings(self) -> dict[str, Any]:
        return {}


def _sigmas(sigma_min: float, sigma_max: float) -> tuple[float, float]:
    low, high = check_number("sigma_min", sigma_min), check_number("sigma_max", sigma_max)
    if not 0 < low < high < math.inf:
        raise ValueError(f"need 0 < sigma_min < sigma_max, got sigma_min={low}, sigma_max={high}")
    return low, high
