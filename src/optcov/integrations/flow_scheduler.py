"""The reverse step as a scheduler of flow matching: diffusers' FlowMatchEulerDiscreteScheduler with a covariance.

x_t = (1 - t) x_0 + t eps, where t is the sigma of diffusers. Its times, shifts and scaling of noise stay; only the
step is ours: with beta_tilde and eta = 0 it is Euler's, with eta > 0 or a covariance it draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor

from optcov.bundle import NumbersPerTime
from optcov.bundle.numbers import IN_VELOCITY
from optcov.covariances import Bounds
from optcov.integrations.extending import extended
from optcov.integrations.stepping import SHIFTS, SIGMAS, OptimalCovarianceSchedulerOutput, Stepper
from optcov.schedule import Schedule, check_number

# from_pretrained looks here for the mixin of a class
__all__ = ["FlowMatchOptimalCovarianceScheduler", "SchedulerMixin"]
SETTINGS = MappingProxyType(
    {
        "covariance": "beta_tilde",
        "eta": 0.0,
        "head_unit": "velocity",
        "head_about": "zero",
        "use_clipped_model_output": None,
        "noise_cap": None,
        "last_step": "mean",
        "prediction_type": "flow_prediction",
        "numbers": None,
        "link": None,
        "guided_half": "second",
    }
)


def _prepare(scheduler: FlowMatchOptimalCovarianceScheduler) -> None:
    config = scheduler.config
    refuse_churn(config)
    known = {name: torch.tensor(values, dtype=torch.float64) for name, values in (config.numbers or {}).items()}
    per_time = {}
    if known:
        numbers = NumbersPerTime.from_tensors(known)
        per_time = {name: numbers.function(name, *[scheduler.schedule] * 2) for name in IN_VELOCITY if name in known}
    scheduler._stepper = Stepper(scheduler.schedule, config, None, per_time)


def refuse_churn(config: Any) -> None:
    """Refuse settings of diffusers' scheduler that have no counterpart here."""
    for wrong in ("invert_sigmas", "stochastic_sampling"):
        if config[wrong]:
            raise ValueError(f"{wrong}=True has no counterpart here; load the scheduler with {wrong}=False")


def refuse_tokens(others: Mapping[str, Any]) -> None:
    """Refuse a time for each token."""
    if others.get("per_token_timesteps") is not None:
        raise ValueError("per_token_timesteps has no counterpart here: all tokens of an image are at one time")


class FlowTimes:
    """What both schedulers of flow matching share."""

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build one from the config of a scheduler of flow matching; those of other processes are refused."""
        if isinstance(config, Mapping) and not config.get("use_flow_sigmas"):
            name = str(config.get("_class_name") or "this configuration")[:80]
            if {"beta_schedule", "beta_min"} & {*config}:
                raise ValueError(
                    f"{name} has betas, so its network is none of flow matching; take BridgeScheduler or "
                    f"OptimalCovarianceScheduler"
                )
            if SIGMAS & {*config} and not SHIFTS & {*config}:
                raise ValueError(
                    f"{name} has the sigmas of a process that adds noise to a full signal, so its network is none of "
                    f"flow matching; give the config of a scheduler such as FlowMatchEulerDiscreteScheduler"
                )
        return super().from_config(config, return_unused_kwargs, **kwargs)  # type: ignore[misc]


def place_of_step(scheduler: FlowMatchEulerDiscreteScheduler, timestep: float | Tensor, *, moves: bool) -> int:
    """Which step of a run this is. One that only asks for a log_prob may be any, and does not count as made."""
    if moves and scheduler.step_index is None and scheduler.begin_index is not None:
        scheduler._init_step_index(timestep)
    if moves and scheduler.step_index is not None:
        return int(scheduler.step_index)
    asked = check_number("timestep", timestep)
    found = (scheduler.timesteps == asked).nonzero()
    if len(found) == 0:
        raise ValueError(f"timestep {asked:g} is not one of this run's; call set_timesteps, then step at them")
    if moves:
        scheduler._init_step_index(timestep)
        return int(scheduler.step_index)
    return int(found[0])


class FlowMatchOptimalCovarianceScheduler(FlowTimes, FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Sample a model of flow matching with the optimal covariance in a pipeline of diffusers.

    Its settings are those of FlowMatchEulerDiscreteScheduler, and those of `OptimalCovarianceScheduler` that choose the
    covariance: covariance, eta, head_unit, head_about, last_step, link, guided_half.
    numbers: {"times": [...], "mean_square_noise": [...], ...} at real times, for analytic and npr_isotropic.
    """

    schedule: Schedule = Schedule.flow()
    __init__ = extended(FlowMatchEulerDiscreteScheduler, SETTINGS, _prepare)

    @property
    def bounds(self) -> Bounds:
        """How many variances of the steps made so far were out of bounds."""
        found: Bounds = self._stepper.process.bounds
        return found

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Choose the times to visit, as diffusers does."""
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        self._stepper.begin()

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        variance_noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
        **others: Any,
    ) -> OptimalCovarianceSchedulerOutput | tuple[Tensor, Tensor, Tensor | None]:
        """Go from timestep to the next one, and say what is known of x_0.

        variance_noise: instead of drawing by the generator. prev_sample: instead of drawing at all, to ask for the
        log_prob of a draw made before. others: the churn of diffusers' scheduler, which has no counterpart here.
        """
        refuse_tokens(others)
        place = place_of_step(self, timestep, moves=prev_sample is None)
        sigmas = self.sigmas.double().cpu()
        t, s = (min(float(sigmas[place + after]), 1.0) for after in (0, 1))
        made = self._stepper.step(
            *(model_output, sample, t, s, float(sigmas[-2])), *(generator, variance_noise, prev_sample)
        )
        if prev_sample is None:
            self._step_index += 1
        return made if return_dict else (made.prev_sample, made.pred_original_sample, made.pred_original_variance)
