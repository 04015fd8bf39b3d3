"""The schedule that a model was trained on, by a scheduler of diffusers in memory or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optcov.checkpoints.errors import CheckpointError
from optcov.prediction import PARAMETERISATIONS
from optcov.schedule import Schedule
from optcov.schedule.from_diffusers import is_flow

MAX_STEPS = 10**5
DISTILLED = ("LCMScheduler", "TCDScheduler", "CMStochasticIterativeScheduler")


def schedule_of(scheduler: Any) -> tuple[Schedule, str]:
    """The schedule of a scheduler of diffusers, and what its network predicts."""
    if not isinstance(getattr(scheduler, "config", None), Mapping):
        raise CheckpointError(
            f"{str(scheduler)[:80]!r} is no schedule; give one such as Schedule.linear() or Schedule.flow(), or a "
            f"scheduler of diffusers"
        )
    config = scheduler.config
    if type(scheduler).__name__ in DISTILLED:
        raise CheckpointError(
            f"{type(scheduler).__name__} is for a distilled model, which predicts one clean image and not the mean of "
            f"all; give the model it was distilled from, with that model's scheduler"
        )
    if "sigma_data" in config:
        raise CheckpointError(
            f"{type(scheduler).__name__} scales the network's input and output itself; give the denoiser D(x, sigma) "
            f"that they make together, as (denoiser, Schedule.edm(), 'sample')"
        )
    try:
        schedule = Schedule.from_diffusers(scheduler)
    except ValueError as error:
        name, reason = type(scheduler).__name__, str(error)
        raise CheckpointError(reason if name in reason else f"{name} gives no noise schedule: {reason}") from error
    kind = "flow_prediction" if is_flow(scheduler) else config.get("prediction_type", "epsilon")
    if kind not in PARAMETERISATIONS:
        raise CheckpointError(f"its network predicts {str(kind)[:50]!r}; known are {', '.join(PARAMETERISATIONS)}")
    return schedule, kind


def schedule_of_config(config: Any) -> tuple[Schedule, str]:
    """The same by the content of a scheduler_config.json."""
    import diffusers

    kind = config.get("_class_name") if isinstance(config, dict) else None
    found: Any = getattr(diffusers, kind, None) if isinstance(kind, str) and kind.endswith("Scheduler") else None
    known = isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)
    if not known:
        raise CheckpointError(f"its scheduler is {str(kind)[:80]!r}, which is none of diffusers; give one of these")
    steps = config.get("num_train_timesteps", 1000)
    if type(steps) is not int or not 1 < steps <= MAX_STEPS:
        raise CheckpointError(f"its scheduler has {str(steps)[:80]} steps; possible are 2 to {MAX_STEPS}")
    betas = config.get("trained_betas")
    if isinstance(betas, list) and len(betas) > MAX_STEPS:
        raise CheckpointError(f"its scheduler has {len(betas)} betas, more than {MAX_STEPS} steps")
    try:
        return schedule_of(found.from_config(config))
    except CheckpointError:
        raise
    # diffusers raises whatever settings of a wrong kind lead to
    except Exception as error:
        raise CheckpointError(f"its scheduler_config.json gives no schedule: {str(error)[:500]}") from error
