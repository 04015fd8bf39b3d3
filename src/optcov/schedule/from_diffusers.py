"""The schedule of a diffusers scheduler, and what its network predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optcov.schedule.base import Schedule


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
    if config.get("rescale_betas_zero_snr"):
        if config.get("prediction_type", "epsilon") == "epsilon":
            raise ValueError(
                "rescale_betas_zero_snr=True ends with pure noise, from which x_0 cannot be recovered by a noise "
                "prediction; load the scheduler with rescale_betas_zero_snr=False"
            )
        betas = _without_last_signal(betas)
    return Schedule.from_betas(betas)


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


def _without_last_signal(betas: Any) -> Any:
    """Zero terminal SNR (Lin et al. 2023, Algorithm 1): sqrt(alpha_bar) moved down and stretched to end at 0."""
    signal = np.sqrt(np.cumprod(1 - betas))
    moved = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    alpha_bar = np.concatenate([[1.0], moved**2])
    return 1 - alpha_bar[1:] / alpha_bar[:-1]
