"""The schedule of a diffusers scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from optcov.schedule.base import Schedule
from optcov.schedule.discrete import DiscreteSchedule


def from_diffusers(scheduler: Any) -> DiscreteSchedule:
    """See Schedule.from_diffusers."""
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
    blind = bool(config.get("rescale_betas_zero_snr"))
    if blind and config.get("prediction_type", "epsilon") == "epsilon":
        raise ValueError(
            "rescale_betas_zero_snr=True ends with pure noise, from which x_0 cannot be recovered by a noise "
            "prediction; load the scheduler with rescale_betas_zero_snr=False"
        )
    schedule = _of_config(scheduler, config)
    return _without_terminal_signal(schedule) if blind else schedule


def _of_config(scheduler: Any, config: Mapping[str, Any]) -> DiscreteSchedule:
    steps, kind = config["num_train_timesteps"], config.get("beta_schedule")
    if config.get("trained_betas") is not None:
        return Schedule.from_betas(config["trained_betas"])
    if kind == "linear":
        return Schedule.from_betas(np.linspace(config["beta_start"], config["beta_end"], steps))
    if kind == "scaled_linear":
        return Schedule.from_betas(np.linspace(config["beta_start"] ** 0.5, config["beta_end"] ** 0.5, steps) ** 2)
    if kind == "squaredcos_cap_v2":
        return Schedule.cosine(steps)
    if config.get("rescale_betas_zero_snr"):
        raise ValueError(
            f"rescale_betas_zero_snr is not known for beta_schedule = {kind!r}; pass trained_betas instead"
        )
    return Schedule.from_betas(scheduler.betas)


def _without_terminal_signal(schedule: DiscreteSchedule) -> DiscreteSchedule:
    """Zero terminal SNR as diffusers makes it: sqrt(alpha_bar) moved and stretched so that it ends at 0."""
    signal = schedule.alpha_bar(schedule.full_grid()).sqrt()
    signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    kept = torch.cat([signal[:1], signal[1:] / signal[:-1]]).square()
    return Schedule.from_betas(1 - kept)
