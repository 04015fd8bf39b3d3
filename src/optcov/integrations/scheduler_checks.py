"""Configs of schedulers that our scheduler cannot take over, refused by name: diffusers drops keys it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optcov.prediction import PARAMETERISATIONS
from optcov.sampling import LAST_STEPS

SHIFTS = {"shift", "base_shift", "max_shift", "use_dynamic_shifting"}  # what schedulers of flow matching set
SIGMAS = {"sigma_min", "sigma_max", "sigma_data"}  # what schedulers of variance-exploding processes set
BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")


def refuse_other_processes(config: Mapping[str, Any]) -> None:
    """Refuse the config of a scheduler whose noise is not that of a variance-preserving process with betas."""
    name = str(config.get("_class_name") or "this configuration")[:80]
    has_betas = any(key in config for key in ("beta_start", "beta_schedule", "trained_betas"))
    predicts = str(config.get("prediction_type", ""))
    if (
        "FlowMa" in name
        or config.get("use_flow_sigmas")
        or "flow" in predicts
        or (SHIFTS & {*config} and not has_betas)
    ):
        raise ValueError(
            f"{name} is one of flow matching, whose noise has no betas and whose network predicts no noise; give the "
            f"config of a scheduler such as DDPMScheduler"
        )
    if SIGMAS & {*config} and not has_betas:
        raise ValueError(f"{name} has no betas but sigmas; give the config of a scheduler such as DDPMScheduler")


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse settings that have no meaning here."""
    kind, trained = config["beta_schedule"], config["trained_betas"]
    if trained is None and kind not in BETA_SCHEDULES:
        raise ValueError(
            f"beta_schedule = {kind!r} is not one of {', '.join(BETA_SCHEDULES)}; pass the betas as trained_betas"
        )
    steps = config["num_train_timesteps"]
    if trained is not None and len(trained) != steps:
        raise ValueError(f"there are {len(trained)} trained_betas, but num_train_timesteps = {steps}")
    if config["thresholding"]:
        raise ValueError("thresholding=True has no counterpart here; use clip_sample, or neither for latents")
    for name, choices in {"prediction_type": PARAMETERISATIONS, "last_step": LAST_STEPS}.items():
        if config[name] not in choices:
            raise ValueError(f"{name} = {config[name]!r} is not one of {', '.join(choices)}")
