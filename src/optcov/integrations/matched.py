"""Bridge 2M and Matched 2M as a scheduler of diffusers: the Gaussian step of optcov.solvers.multistep, call by call.

diffusers counts times 0..N-1: its t is our t - 1. The noise is not part of the config: a pipeline that was
saved and loaded again needs `attach` again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from optcov.integrations.stepping import DiscreteTimes
from optcov.prediction import Prediction, check_kind
from optcov.schedule import Schedule
from optcov.solvers import MatchedNoise, bridge_noise, few_step_times


@dataclass
class MatchedSchedulerOutput(BaseOutput):  # type: ignore[misc]
    """What a step returns."""

    prev_sample: Tensor  # x_s, (B, C, H, W)
    pred_original_sample: Tensor  # x0_hat, (B, C, H, W), as the network says it
    log_prob: Tensor | None = None  # of x_s given the history, in nats, (B,); None at the last step, which is a mean


class MatchedScheduler(DiscreteTimes, SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Sample by Bridge 2M or Matched 2M in a pipeline of diffusers.

    >>> scheduler = MatchedScheduler(trained_betas=[0.01] * 100, num_train_timesteps=100)
    >>> scheduler.use([])  # what Bundle.matched holds
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        trained_betas: list[float] | None = None,
        prediction_type: str = "epsilon",
        data_range: list[float] | None = None,
    ):
        check_kind(prediction_type)
        betas = trained_betas
        self.schedule = Schedule.linear(num_train_timesteps) if betas is None else Schedule.from_betas(betas)
        if self.schedule.grid_size != num_train_timesteps:
            raise ValueError(
                f"there are {self.schedule.grid_size} trained_betas, but num_train_timesteps = {num_train_timesteps}"
            )
        self.alphas_cumprod = self.schedule.alpha_bar(self.schedule.full_grid())
        self.timesteps = torch.arange(num_train_timesteps - 1, -1, -1)
        self.num_inference_steps: int | None = None
        self._known: dict[int, MatchedNoise] = {}
        self._bridge_shape: tuple[int, ...] | None = None
        self._noise: MatchedNoise | None = None
        self._previous: Prediction | None = None

    def use(self, noises: Sequence[MatchedNoise]) -> None:
        """Draw with these, one for each number of steps; those of other schedules are left out."""
        here, self._bridge_shape = self.schedule.digest(), None
        self._known = {len(noise.trajectory): noise for noise in noises if noise.schedule.digest() == here}

    def use_bridge(self, shape: Sequence[int]) -> None:
        """Draw images of this shape by Bridge 2M, in any number of steps."""
        self._bridge_shape = tuple(shape)

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Take the trajectory of this number of steps, and forget the last run."""
        if self._bridge_shape is not None:
            times_of_run = few_step_times(self.schedule, num_inference_steps)
            self._known = {num_inference_steps: bridge_noise(self.schedule, times_of_run, self._bridge_shape)}
        if num_inference_steps not in self._known:
            known = ", ".join(map(str, sorted(self._known))) or "none"
            raise ValueError(
                f"there is no matched noise for {num_inference_steps} steps (there is for: {known}); measure it by "
                f"bundle.with_matched_noise(images, steps={num_inference_steps}), then attach the bundle again"
            )
        self._noise, self._previous = self._known[num_inference_steps], None
        self.num_inference_steps = num_inference_steps
        times = self._noise.trajectory.diffusers_timesteps(self.schedule)
        self.timesteps = torch.tensor(times, dtype=torch.long, device=device)

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        variance_noise: Tensor | None = None,
        **ignored: Any,
    ) -> MatchedSchedulerOutput | tuple[Tensor, ...]:
        """Go from timestep to the next one. Steps must be made in order: each uses what the network said before.

        variance_noise: instead of drawing by the generator. Other arguments that pipelines pass (eta) are ignored.
        """
        if self._noise is None:
            raise ValueError("call set_timesteps before the first step")
        t = int(timestep) + 1
        u, s = self._neighbours(t)
        last = None if self._previous is None else self._previous.t
        if u != last:
            raise ValueError(
                f"timestep {t - 1} does not follow the last one; make the steps in order, and call set_timesteps first"
            )
        dtype = torch.promote_types(sample.dtype, torch.float32)
        x_t, output = sample.to(dtype), model_output.to(dtype)
        current = Prediction(x_t, t, output, self.config.prediction_type, *self.schedule.levels(t))
        gaussian = self._noise.step(current, s, self._previous)
        self._previous = None if s == 0 else current
        x_s, log_prob = gaussian.mean, None
        if s > 0:
            drawn = variance_noise
            if drawn is None:
                drawn = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=dtype)
            x_s = gaussian.sample(drawn.to(dtype))
            log_prob = gaussian.log_prob(x_s)
        elif self.config.data_range is not None:
            x_s = x_s.clamp(*self.config.data_range)
        result = MatchedSchedulerOutput(x_s.to(sample.dtype), current.clean.to(sample.dtype), log_prob)
        return result if return_dict else (result.prev_sample, result.pred_original_sample)

    def _neighbours(self, t: int) -> tuple[float | None, float]:
        """The time before t on the way, and the one after it."""
        assert self._noise is not None
        way = [*reversed(self._noise.trajectory.times), 0]
        if t not in way[:-1]:
            raise ValueError(f"timestep {t - 1} is not one of this run's; call set_timesteps, then step at them")
        place = way.index(t)
        return (way[place - 1] if place else None), way[place + 1]
