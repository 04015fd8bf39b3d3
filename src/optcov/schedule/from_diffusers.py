"""The schedule of a diffusers scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
