"""The forward process and the Gaussian bridge q(x_s | x_t, x_0) between two times (Eq. 2).

With c = -expm1(log_snr_t - log_snr_s), the share of the noise-to-signal ratio that was added since s:

    variance      lambda^2 = eta^2 beta_bar_s c
    noisy weight  kappa    = sqrt(beta_bar_s / beta_bar_t) sqrt(1 - eta^2 c)
    clean weight  gamma    = sqrt(alpha_bar_s) (1 - sqrt((1 - c) (1 - eta^2 c)))

eta = 1 is DDPM's process, eta = 0 is DDIM's. In the paper's symbols, c = beta_{t|s} / beta_bar_t for a
variance-preserving process. The formulas subtract no nearly equal numbers, and s = 0 is no special case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from numbers import Real
from typing import final

import torch
from torch import Tensor

from optcov.gaussian import Gaussian, weighted_sum
from optcov.schedule import Schedule, Time, check_schedule

_number = partial(torch.tensor, dtype=torch.float64)


@final
@dataclass(frozen=True)
class Bridge:
    """q(x_s | x_t, x_0) = N(clean_weight x_0 + noisy_weight x_t, variance I); float64, () or (B,)."""

    clean_weight: Tensor  # gamma
    noisy_weight: Tensor  # kappa
    variance: Tensor  # lambda^2

    def apply(self, posterior: Gaussian, anchor: Tensor) -> Gaussian:
        """Turn a Gaussian over x_0 into one over x_s, with `anchor` in the place of x_t (Eqs. 1, 6)."""
        mean = weighted_sum(self.clean_weight, posterior.mean, self.noisy_weight, anchor)
        return Gaussian(mean, posterior.covariance.affine(self.clean_weight.square(), self.variance))


@final
@dataclass(frozen=True)
class ForwardProcess:
    """A schedule with a choice of eta in [0, 1].

    >>> forward = ForwardProcess(Schedule.linear(), eta=1.0)
    >>> round(float(forward.bridge(112, 1).variance), 9)  # beta-tilde
    9.9931e-05
    """

    schedule: Schedule
    eta: float = 1.0

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if not isinstance(self.eta, Real) or not 0.0 <= self.eta <= 1.0:
            raise ValueError(f"eta = {self.eta} is outside [0, 1]; 1 is DDPM's forward process, 0 is DDIM's")

    def diffuse(self, x_0: Tensor, t: Time, noise: Tensor) -> Tensor:
        """Make x_t from x_0 (B, *D) and standard normal noise of the same shape."""
        for name, value in (("x_0", x_0), ("noise", noise)):
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} is a {type(value).__name__}, not a torch tensor; convert it by torch.as_tensor"
                )
        if not (x_0.is_floating_point() and noise.is_floating_point()):
            raise ValueError(
                f"x_0 and noise must be floating-point tensors, got {x_0.dtype} and {noise.dtype}; bring 8-bit images "
                f"to [-1, 1] first"
            )
        if noise.shape != x_0.shape:
            raise ValueError(f"noise has shape {tuple(noise.shape)}, but x_0 has {tuple(x_0.shape)}; they must agree")
        signal, spread = self.levels(t)
        return weighted_sum(signal, x_0, spread, noise)

    def levels(self, t: Time) -> tuple[Tensor, Tensor]:
        """sqrt(alpha_bar) and sqrt(beta_bar), () or (B,): the weights of x_0 and noise in x_t."""
        if not isinstance(t, Real):
            return self.schedule.levels(t)
        signal, spread = _remembered_levels(self.schedule, t)
        return _number(signal), _number(spread)

    def bridge(self, t: Time, s: Time) -> Bridge:
        """Coefficients of the step from time t down to time s, 0 <= s < t."""
        if not (isinstance(t, Real) and isinstance(s, Real)):
            return _bridge(self, t, s)
        # numbers are remembered, tensors are fresh: nobody can change a later step
        gamma, kappa, lam2 = _remembered_bridge(self, t, s)
        return Bridge(_number(gamma), _number(kappa), _number(lam2))


def _bridge(forward: ForwardProcess, t: Time, s: Time) -> Bridge:
    schedule, eta = forward.schedule, forward.eta
    t, s = schedule.check_times(t), schedule.check_times(s)
    if t.ndim and s.ndim and t.shape != s.shape:
        raise ValueError(f"t has {len(t)} times and s has {len(s)}; pass one of each per sample, or a number")
    if bool((s >= t).any()):
        raise ValueError(
            f"a step goes from t down to s < t, but got t = {t.tolist()} and s = {s.tolist()}; swap or change them"
        )
    log_ratio = schedule.log_snr(t) - schedule.log_snr(s)
    new_share, old_share = -torch.expm1(log_ratio), torch.exp(log_ratio)  # c and 1 - c, neither by subtraction
    kept = (1 - eta**2) + eta**2 * old_share  # 1 - eta^2 c
    beta_bar_s = schedule.beta_bar(s)
    # 1 - sqrt(p) = (1 - p) / (1 + sqrt(p)) with p = (1 - c)(1 - eta^2 c), so that 1 - p = c + eta^2 c (1 - c)
    lost = new_share * (1 + eta**2 * old_share) / (1 + (old_share * kept).sqrt())
    return Bridge(
        clean_weight=schedule.alpha_bar(s).sqrt() * lost,
        noisy_weight=(beta_bar_s / schedule.beta_bar(t)).sqrt() * kept.sqrt(),
        variance=eta**2 * beta_bar_s * new_share,
    )


@lru_cache(maxsize=4096)  # a sampling loop asks for the same steps in every batch
def _remembered_bridge(forward: ForwardProcess, t: float, s: float) -> tuple[float, float, float]:
    bridge = _bridge(forward, t, s)
    return float(bridge.clean_weight), float(bridge.noisy_weight), float(bridge.variance)


@lru_cache(maxsize=4096)
def _remembered_levels(schedule: Schedule, t: float) -> tuple[float, float]:
    signal, spread = schedule.levels(t)
    return float(signal), float(spread)


def first_step_variance(schedule: Schedule) -> Tensor:
    """beta-tilde(1 | 2), (): the variance that the paper gives to the last step when scoring.

    1 and 2 count steps of the full process. For real times a step is a thousandth of the final time.
    """
    unit = schedule.small_step
    if 2 * unit > schedule.final_time:
        raise ValueError("beta-tilde(1|2) needs a schedule of at least 2 steps, but this one has 1")
    return ForwardProcess(schedule).bridge(2 * unit, unit).variance
