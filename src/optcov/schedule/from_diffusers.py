"""The schedule of a diffusers scheduler, and what its network predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optcov.schedule.base import Schedule

TOLERANCE = 1e-3  # of alpha-bar: schedulers compute in float32


def from_diffusers(scheduler: Any) -> Schedule:
    """See Schedule.from_diffusers."""
    config: Mapping[str, Any] = getattr(scheduler, "config", {})
    kind = type(scheduler).__name__
    if is_flow(scheduler):
        # a shift chooses which times are visited; the process stays the same
        return Schedule.flow()
    if "sigma_data" in config:
        return Schedule.edm(float(config["sigma_min"]), float(config["sigma_max"]))
    if "num_train_timesteps" not in config or not hasattr(scheduler, "betas"):
        raise ValueError(
            f"{kind} has no noise schedule that is known here: it is not a diffusers scheduler with betas, of flow "
            f"matching or of EDM; pass one such as DDPMScheduler, or use Schedule.from_betas"
        )
    betas = _betas(scheduler, config)
    if config.get("rescale_betas_zero_snr") and config.get("prediction_type", "epsilon") == "epsilon":
        raise ValueError(
            "rescale_betas_zero_snr=True ends with pure noise, from which x_0 cannot be recovered by a noise "
            "prediction; load the scheduler with rescale_betas_zero_snr=False"
        )
    schedule = Schedule.from_betas(_moved(betas, config))
    _require_its_own(schedule, scheduler)
    return schedule


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler is one of flow matching."""
    config: Mapping[str, Any] = getattr(scheduler, "config", {})
    flow = config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction"
    return bool(flow) or "FlowMatch" in type(scheduler).__name__


def _betas(scheduler: Any, config: Mapping[str, Any]) -> Any:
    steps, kind = config["num_train_timesteps"], config.get("beta_schedule")
    if config.get("trained_betas") is not None:
        return np.asarray(config["trained_betas"], np.float64)
    if kind == "linear":
        return np.linspace(config["beta_start"], config["beta_end"], steps)
    if kind == "scaled_linear":
        return np.linspace(config["beta_start"] ** 0.5, config["beta_end"] ** 0.5, steps) ** 2
    if kind == "squaredcos_cap_v2":
        return Schedule.cosine(steps).betas.numpy()
    return scheduler.betas.double().numpy()


def _moved(betas: Any, config: Mapping[str, Any]) -> Any:
    """Betas whose SNR is divided by a number (CogVideoX), and that end without signal, where the config says so."""
    shift, zero = float(config.get("snr_shift_scale") or 1.0), bool(config.get("rescale_betas_zero_snr"))
    if shift == 1 and not zero:
        return betas
    alpha_bar = np.cumprod(1 - betas)
    alpha_bar = alpha_bar / (shift + (1 - shift) * alpha_bar)
    if zero:  # Lin et al. 2023, Algorithm 1: sqrt(alpha_bar) moved down and stretched to end at 0
        signal = np.sqrt(alpha_bar)
        alpha_bar = ((signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])) ** 2
    return 1 - alpha_bar / np.concatenate([[1.0], alpha_bar[:-1]])


def _require_its_own(schedule: Schedule, scheduler: Any) -> None:
    """Refuse a scheduler that changes its betas by settings that are not known here."""
    theirs = getattr(scheduler, "alphas_cumprod", None)
    if theirs is None:
        return
    ours = schedule.alpha_bar(schedule.full_grid())
    if theirs.shape != ours.shape or not bool((theirs.cpu().double() - ours).abs().max() < TOLERANCE):
        raise ValueError(
            f"{type(scheduler).__name__} has other alphas_cumprod than its betas give; build the schedule by "
            f"Schedule.from_betas"
        )
