"""How noisy each time is: signal power alpha_bar, noise power beta_bar, and the logarithm of their ratio.

q(x_t | x_0) = N(sqrt(alpha_bar_t) x_0, beta_bar_t I)  (Eq. 2). Time 0 is data. A discrete schedule counts its times
0..N; real times run over [0, 1], and those of EDM are its sigma. Everything is float64, and beta_bar is computed from
log alpha_bar, never as 1 - alpha_bar, so that nothing cancels at either end.

A schedule answers what depends on its kind: `first_time`, `small_step`, `grid`, `time_at`, `stream`, `spec`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from numbers import Real
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from optcov.identity import digest, digest_numbers, known_by

Time = float | Tensor  # a number, or a (B,) tensor
_Self = TypeVar("_Self")


def remembered(method: Callable[[_Self, Time], Tensor]) -> Callable[[_Self, Time], Tensor]:
    """Keep what a method returns, (), for times that are numbers: a loop asks for the same ones again and again."""

    @lru_cache(maxsize=4096)
    def known(owner: _Self, t: float) -> tuple[float, torch.dtype]:
        found = method(owner, t)
        return found.item(), found.dtype

    @wraps(method)
    def at(self: _Self, t: Time) -> Tensor:
        if not isinstance(t, Real):
            return method(self, t)
        value, dtype = known(self, t)
        # a fresh one: whoever changes it in place, or asks in inference mode, changes nobody else's
        return torch.tensor(value, dtype=dtype)

    return at


class Schedule(ABC):
    """Noise levels by time.

    Build one by `linear`, `cosine`, `vp_sde`, `ve_sde`, `edm`, `flow`, `from_betas` or `from_diffusers`. A new one
    defines the four abstract methods, and its final time.

    >>> schedule = Schedule.linear()
    >>> round(float(schedule.alpha_bar(500)), 6)
    0.078587
    """

    steps: int | None = None  # N of a discrete schedule; None for real times
    final_time: float = 1.0  # N, 1, or the largest sigma
    first_time: float = 1e-5  # the smallest time that networks are trained at
    small_step: float = 1e-3  # one step of the full process: 1, or a thousandth of real times
    name: str = "betas"  # as `spec` calls it
    preserves_variance: bool = True  # whether alpha_bar + beta_bar = 1 at every time

    @abstractmethod
    def log_alpha_bar(self, t: Time) -> Tensor:
        """Logarithm of the signal power, () or (B,)."""

    @abstractmethod
    def log_beta_bar(self, t: Time) -> Tensor:
        """Logarithm of the noise power, () or (B,); minus infinity at time 0."""

    @abstractmethod
    def time_at(self, log_snr: Tensor) -> Tensor:
        """The time of a log-SNR that the schedule has, float64; between discrete times it is interpolated."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The arguments that build it again by the function of its name, as plain JSON values."""

    @remembered
    def check_times(self, t: Time) -> Tensor:
        """Return times as a CPU tensor, or raise a ValueError that names the one that does not fit."""
        times = torch.as_tensor(t, dtype=torch.float64).detach().cpu()
        if times.ndim > 1:
            raise ValueError(f"times must be a number or a (B,) tensor, got shape {tuple(times.shape)}")
        outside = ~((times >= 0) & (times <= self.final_time))
        if bool(outside.any()):
            raise ValueError(
                f"time {_first(times, outside)} is outside this schedule; use real times from 0 to {self.final_time:g}"
                f"{' (divide a step number by the number of steps)' if self.final_time == 1 else ''}"
            )
        return times

    @property
    def grid_size(self) -> int:
        """How many times the full process visits: N, or 1000 of real times."""
        return self.steps or 1000

    def grid(self, numbers: Iterable[int]) -> list[float]:
        """Times of the full process by their numbers in 0..grid_size."""
        return [n if self.steps else n * self.final_time / self.grid_size for n in numbers]

    def stream(self, t: float) -> int:
        """The number under which the noise of a time is drawn; real times are told apart down to 1e-9."""
        return int(t) if self.steps else round(t * 10**9)

    def spec(self) -> dict[str, Any]:
        """Name and settings, as plain JSON values: what a file says of it, and what tells two schedules apart."""
        return {"kind": self.name, **self.settings()}

    def levels(self, t: Time) -> tuple[Tensor, Tensor]:
        """sqrt(alpha_bar) and sqrt(beta_bar), () or (B,): the weights of x_0 and noise in x_t."""
        return self.alpha_bar(t).sqrt(), self.beta_bar(t).sqrt()

    @remembered
    def alpha_bar(self, t: Time) -> Tensor:
        """Signal power, () or (B,)."""
        return self.log_alpha_bar(t).exp()

    @remembered
    def beta_bar(self, t: Time) -> Tensor:
        """Noise power, () or (B,)."""
        return self.log_beta_bar(t).exp()

    @remembered
    def log_snr(self, t: Time) -> Tensor:
        """log(alpha_bar / beta_bar), () or (B,); infinite at time 0."""
        return self.log_alpha_bar(t) - self.log_beta_bar(t)

    def digest(self) -> str:
        """SHA-256 of the noise levels, in hexadecimal: the same for all schedules that give the same numbers."""
        at = torch.tensor(self.grid(range(1, self.grid_size + 1)), dtype=torch.long if self.steps else torch.float64)
        return digest([self.steps, digest_numbers(self.log_alpha_bar(at)), digest_numbers(self.log_snr(at))])

    def identity(self) -> dict[str, str]:
        """The entry of an identity: known by the levels, shown by the name."""
        return known_by(self.digest(), repr(self))

    @staticmethod
    def linear(steps: int = 1000, scale: bool = True) -> DiscreteSchedule:
        """Betas evenly spaced from 1e-4 to 0.02, multiplied by 1000 / steps unless scale is False."""
        steps = _check_steps(steps)
        factor = 1000 / steps if scale else 1.0
        return Schedule.from_betas(np.linspace(factor * 1e-4, factor * 0.02, steps))

    @staticmethod
    def cosine(steps: int = 1000, max_beta: float = 0.999) -> DiscreteSchedule:
        """The squared-cosine schedule of Improved DDPM."""
        steps = _check_steps(steps)
        grid = np.arange(steps + 1) / steps
        signal = np.cos((grid + 0.008) / 1.008 * math.pi / 2) ** 2
        return Schedule.from_betas(np.minimum(1 - signal[1:] / signal[:-1], max_beta))

    @staticmethod
    def vp_sde(beta_min: float = 0.1, beta_max: float = 20.0) -> VPSchedule:
        """The variance-preserving SDE with beta(t) = beta_min + t (beta_max - beta_min), t in [0, 1]."""
        return VPSchedule(beta_min, beta_max)

    @staticmethod
    def ve_sde(sigma_min: float = 0.01, sigma_max: float = 50.0) -> VESchedule:
        """The variance-exploding SDE: alpha_bar = 1, beta_bar = sigma(t)^2 - sigma_min^2 with sigma geometric in t."""
        return VESchedule(sigma_min, sigma_max)

    @staticmethod
    def edm(sigma_min: float = 0.002, sigma_max: float = 80.0) -> EDMSchedule:
        """EDM's (Karras et al. 2022): x_t = x_0 + t eps; a time is its sigma, real, in (0, sigma_max]."""
        return EDMSchedule(sigma_min, sigma_max)

    @staticmethod
    def flow() -> FlowSchedule:
        """Flow matching (rectified flow): x_t = (1 - t) x_0 + t eps, real times in (0, 1]."""
        return FlowSchedule()

    @staticmethod
    def from_betas(betas: Sequence[float] | np.ndarray[Any, Any] | Tensor) -> DiscreteSchedule:
        """Any variance-preserving schedule by its betas at times 1..N, each in (0, 1)."""
        return DiscreteSchedule(torch.as_tensor(betas, dtype=torch.float64).detach().cpu().clone())

    @staticmethod
    def from_diffusers(scheduler: Any) -> DiscreteSchedule:
        """The schedule of a diffusers scheduler, recomputed in float64 from its config.

        diffusers counts times 0..N-1, so its t is our t - 1. Schedules other than linear, scaled_linear and
        squaredcos_cap_v2 are taken from the scheduler's own float32 betas.
        """
        return _from_diffusers(scheduler)


@final
class DiscreteSchedule(Schedule):
    """Times 0..N with alpha_bar_n = prod (1 - beta_i)."""

    def __init__(self, betas: Tensor):
        if betas.ndim != 1 or len(betas) == 0:
            raise ValueError(f"betas must be a non-empty one-dimensional sequence, got shape {tuple(betas.shape)}")
        outside = ~((betas > 0) & (betas < 1))
        if bool(outside.any()):
            n = int(outside.nonzero()[0])
            raise ValueError(
                f"betas[{n}] = {float(betas[n])} is outside (0, 1); a beta is the share of noise added in one step, "
                f"so clip the sequence to that interval (cosine schedules use at most 0.999)"
            )
        self.steps: int = len(betas)
        self.final_time = float(self.steps)
        self.first_time = self.small_step = 1
        self.betas = betas.double()
        zero = torch.zeros(1, dtype=torch.float64)
        self._log_alpha_bar = torch.cat([zero, torch.log1p(-self.betas).cumsum(0)])
        self._log_beta_bar = torch.log(-torch.expm1(self._log_alpha_bar))
        _check_signal_left(float(self._log_alpha_bar[-1]), "betas")
        flat = self._log_alpha_bar.exp().diff() >= 0
        if bool(flat.any()):
            n = int(flat.nonzero()[0])
            raise ValueError(f"betas[{n}] = {float(betas[n])} is too small to change alpha_bar; drop that step")

    @remembered
    def check_times(self, t: Time) -> Tensor:
        # not in the default dtype, which may be a half precision that merges neighbouring times
        times = torch.as_tensor(t, dtype=None if isinstance(t, Tensor) else torch.float64).detach().cpu()
        if times.ndim > 1:
            raise ValueError(f"times must be a number or a (B,) tensor, got shape {tuple(times.shape)}")
        if times.is_floating_point() and bool((times != times.round()).any()):
            raise ValueError(
                f"time {_first(times, times != times.round())} is not an integer; this schedule has the times "
                f"0..{self.steps} (use Schedule.vp_sde() for real times)"
            )
        outside = (times < 0) | (times > self.final_time)
        if bool(outside.any()):
            raise ValueError(
                f"time {_first(times, outside)} is outside this schedule; use times from 0 to {self.steps}"
            )
        return times.long()

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
                    candidate = build(self.steps, **options)
                except ValueError:  # a family need not exist for every number of steps: 1000 / steps can exceed 50
                    continue
                if torch.equal(candidate.betas, self.betas):
                    return {"kind": name, "steps": self.steps, **options}
        return super().spec()

    def log_alpha_bar(self, t: Time) -> Tensor:
        return self._log_alpha_bar[self.check_times(t)]

    def log_beta_bar(self, t: Time) -> Tensor:
        return self._log_beta_bar[self.check_times(t)]

    def __repr__(self) -> str:
        return f"DiscreteSchedule(steps={self.steps}, betas={float(self.betas[0]):.3g}..{float(self.betas[-1]):.3g})"


@final
class VPSchedule(Schedule):
    """dx = -beta(t)/2 x dt + sqrt(beta(t)) dw, so that log alpha_bar = -integral of beta."""

    name = "vp_sde"

    def __init__(self, beta_min: float, beta_max: float):
        if not 0 < beta_min <= beta_max < math.inf:
            raise ValueError(f"need 0 < beta_min <= beta_max, got beta_min={beta_min}, beta_max={beta_max}")
        self.beta_min, self.beta_max = float(beta_min), float(beta_max)
        _check_signal_left(-(self.beta_min + self.beta_max) / 2, "beta_max")

    def beta(self, t: Time) -> Tensor:
        """Rate of noise beta(t), () or (B,)."""
        return self.beta_min + self.check_times(t) * (self.beta_max - self.beta_min)

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

    def on_grid(self, steps: int = 1000) -> DiscreteSchedule:
        """The same process at the times n / steps alone, as samplers with discrete times need it."""
        grid = torch.arange(_check_steps(steps) + 1, dtype=torch.float64) / steps
        return DiscreteSchedule(-torch.expm1(self.log_alpha_bar(grid).diff()))

    def __repr__(self) -> str:
        return f"VPSchedule(beta_min={self.beta_min}, beta_max={self.beta_max})"


@final
class VESchedule(Schedule):
    """dx = g(t) dw with sigma(t) = sigma_min (sigma_max / sigma_min)^t, so that no signal is lost."""

    name = "ve_sde"
    preserves_variance = False

    def __init__(self, sigma_min: float, sigma_max: float):
        if not 0 < sigma_min < sigma_max < math.inf:
            raise ValueError(f"need 0 < sigma_min < sigma_max, got sigma_min={sigma_min}, sigma_max={sigma_max}")
        self.sigma_min, self.sigma_max = float(sigma_min), float(sigma_max)

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

    def __repr__(self) -> str:
        return f"VESchedule(sigma_min={self.sigma_min}, sigma_max={self.sigma_max})"


@final
class EDMSchedule(Schedule):
    """x_t = x_0 + t eps: the time is the noise level itself."""

    name = "edm"
    preserves_variance = False

    def __init__(self, sigma_min: float, sigma_max: float):
        if not 0 < sigma_min < sigma_max < math.inf:
            raise ValueError(f"need 0 < sigma_min < sigma_max, got sigma_min={sigma_min}, sigma_max={sigma_max}")
        self.first_time, self.final_time = float(sigma_min), float(sigma_max)
        self.small_step = self.final_time / self.grid_size

    def log_alpha_bar(self, t: Time) -> Tensor:
        return torch.zeros_like(self.check_times(t))

    def log_beta_bar(self, t: Time) -> Tensor:
        return 2 * torch.log(self.check_times(t))

    def time_at(self, log_snr: Tensor) -> Tensor:
        return torch.exp(-log_snr.double() / 2)

    def settings(self) -> dict[str, Any]:
        return {"sigma_min": self.first_time, "sigma_max": self.final_time}

    def __repr__(self) -> str:
        return f"EDMSchedule(sigma_min={self.first_time}, sigma_max={self.final_time})"


@final
class FlowSchedule(Schedule):
    """x_t = (1 - t) x_0 + t eps; at t = 1 no signal is left."""

    name = "flow"
    preserves_variance = False

    def log_alpha_bar(self, t: Time) -> Tensor:
        return 2 * torch.log1p(-self.check_times(t))

    def log_beta_bar(self, t: Time) -> Tensor:
        return 2 * torch.log(self.check_times(t))

    def time_at(self, log_snr: Tensor) -> Tensor:
        return torch.sigmoid(-log_snr.double() / 2)

    def settings(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return "FlowSchedule()"


def _check_steps(steps: int) -> int:
    if not is_whole(steps) or steps < 1:
        raise ValueError(f"steps = {steps!r} is not a positive integer; a schedule needs at least one step")
    return int(steps)


def is_whole(value: Any) -> bool:
    """Whether a number is an integer, as 3, 3.0 and numpy's 3 are."""
    return isinstance(value, Real) and math.isfinite(value) and float(value).is_integer()


def _check_signal_left(log_alpha_bar: float, what: str) -> None:
    """Refuse a schedule at whose end x_0 could not be recovered in float32: it divides by sqrt(alpha_bar)."""
    if log_alpha_bar < math.log(1e-36):
        raise ValueError(
            f"the signal vanishes: the logarithm of the last alpha_bar is {log_alpha_bar:.1f}, below that of 1e-36; "
            f"use smaller {what} or fewer steps"
        )


def _first(times: Tensor, where: Tensor) -> float:
    value = float(times[where].flatten()[0])
    return int(value) if value.is_integer() else value


def _from_diffusers(scheduler: Any) -> DiscreteSchedule:
    config: Mapping[str, Any] = getattr(scheduler, "config", {})
    if "num_train_timesteps" not in config or not hasattr(scheduler, "betas"):
        raise ValueError(
            f"{type(scheduler).__name__} is not a diffusers scheduler with betas (flow-matching and sigma-space "
            f"schedulers have none); pass one such as DDPMScheduler, or use Schedule.from_betas"
        )
    if config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction":
        raise ValueError(
            f"this {type(scheduler).__name__} is set to flow matching, whose path is not that of its betas; "
            f"load it with use_flow_sigmas=False"
        )
    if config.get("rescale_betas_zero_snr"):
        raise ValueError(
            "rescale_betas_zero_snr=True ends with pure noise, from which x_0 cannot be recovered by a noise "
            "prediction; load the scheduler with rescale_betas_zero_snr=False"
        )
    steps, kind = config["num_train_timesteps"], config.get("beta_schedule")
    if config.get("trained_betas") is not None:
        return Schedule.from_betas(config["trained_betas"])
    if kind == "linear":
        return Schedule.from_betas(np.linspace(config["beta_start"], config["beta_end"], steps))
    if kind == "scaled_linear":
        return Schedule.from_betas(np.linspace(config["beta_start"] ** 0.5, config["beta_end"] ** 0.5, steps) ** 2)
    if kind == "squaredcos_cap_v2":
        return Schedule.cosine(steps)
    return Schedule.from_betas(scheduler.betas)
