"""Bridge 2M and Matched 2M as diffusers schedulers. Each call makes one Gaussian step of optcov.solvers.multistep.

A `BridgeScheduler` needs only the config of another scheduler, so it works in any pipeline with betas. A
`FlowMatchBridgeScheduler` does the same for flow matching. diffusers counts discrete times 0..N-1, so its t is our t -
1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
from diffusers import ConfigMixin, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from diffusers.utils import BaseOutput
from torch import Tensor

from optcov.integrations.extending import extended
from optcov.integrations.flow_scheduler import FlowTimes, place_of_step, refuse_churn, refuse_tokens
from optcov.integrations.stepping import (
    DiscreteTimes,
    RunNoise,
    check_draw,
    check_output,
    log_density,
    require_finite,
    whole_timestep,
)
from optcov.prediction import Prediction, check_kind
from optcov.schedule import Schedule, is_whole
from optcov.solvers import BridgeNoise, MatchedNoise, MultistepNoise, few_step_times
from optcov.solvers.multistep import ETA, FIRST_SIGMA, check_sides
from optcov.trajectory import Trajectory

# from_pretrained looks here for the mixin of a class
__all__ = ["BridgeScheduler", "FlowMatchBridgeScheduler", "MatchedScheduler", "MultistepOutput", "SchedulerMixin"]


@dataclass
class MultistepOutput(BaseOutput):  # type: ignore[misc]
    """What a step returns."""

    prev_sample: Tensor  # x_s, (B, C, H, W)
    pred_original_sample: Tensor  # x0_hat, (B, C, H, W), as the network says it
    log_prob: Tensor | None = None  # of x_s given the history, in nats, (B,); None at the last step, which is a mean


@final
class MultistepRun:
    """One run of a multistep sampler. It steps by given network outputs, and remembers the last ones."""

    def __init__(self, noise: MultistepNoise, kind: str, data_range: tuple[float, float] | None = None):
        self.noise, self.kind, self.data_range = noise, kind, data_range
        self.first = 0  # place of the first step among the times, descending
        self._way = [*reversed(noise.trajectory.times), 0.0]
        self._said: dict[float, Prediction] = {}
        self._drawing = RunNoise()

    def step(
        self,
        model_output: Tensor,
        t: float,
        sample: Tensor,
        generator: Any = None,
        variance_noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
    ) -> MultistepOutput:
        """Go from t to the time after it."""
        check_output(model_output, sample)
        check_draw(prev_sample, sample, variance_noise)
        if model_output.shape[1] < sample.shape[1]:
            raise ValueError(
                f"the output has {model_output.shape[1]} channels for {sample.shape[1]}; pass the network's own"
            )
        u, s = self._neighbours(t)
        dtype = torch.promote_types(sample.dtype, torch.float32)
        x_t, output = sample.to(dtype), model_output[:, : sample.shape[1]].to(dtype)
        current = Prediction(x_t, t, output, self.kind, *self.noise.schedule.levels(t))
        if u is not None and self._said[u].x_t.shape != x_t.shape:
            raise ValueError(
                f"the sample has shape {tuple(x_t.shape)}, and at the step before {tuple(self._said[u].x_t.shape)}; "
                f"call set_timesteps before another batch"
            )
        self._said = {time: said for time, said in self._said.items() if time == u} | {t: current}
        gaussian = self.noise.step(current, s, None if u is None else self._said[u])
        x_s, log_prob = gaussian.mean, None
        if s > 0:
            if prev_sample is None:
                drawn = self._drawing.draw(sample, dtype, generator) if variance_noise is None else variance_noise
                prev_sample = gaussian.sample(drawn.to(dtype))
            x_s = prev_sample.to(sample.dtype)
            log_prob = log_density(gaussian, x_s)
        else:
            x_s = x_s if self.data_range is None else x_s.clamp(*self.data_range)
            require_finite(x_s)  # read once, at the end of a run
        return MultistepOutput(x_s.to(sample.dtype), current.clean.to(sample.dtype), log_prob)

    def _neighbours(self, t: float) -> tuple[float | None, float]:
        """The time before t on the way, if the run came from there, and the one after it."""
        if t not in self._way[:-1]:
            raise ValueError("this timestep is not one of this run's; call set_timesteps, then step at them")
        place = self._way.index(t)
        if place > self.first and self._way[place - 1] not in self._said:
            raise ValueError(
                "this timestep does not follow the last one; make the steps in order, and call set_timesteps first"
            )
        return (self._way[place - 1] if place > self.first else None), self._way[place + 1]


class _Multistep(DiscreteTimes):
    """What both discrete schedulers share."""

    timesteps: Tensor
    num_inference_steps: int | None
    _run: MultistepRun | None

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Begin the run at a later time, as pipelines do that start from an image."""
        if not is_whole(begin_index) or not 0 <= begin_index < len(self.timesteps):
            raise ValueError(
                f"begin_index = {begin_index!r:.80} is not the number of one of this run's timesteps; pass a whole "
                f"number from 0 to {len(self.timesteps) - 1}"
            )
        if self._run is not None:
            self._run.first = int(begin_index)

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        variance_noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
        **ignored: Any,
    ) -> MultistepOutput | tuple[Tensor, ...]:
        """Go from timestep to the next one. Steps must be made in order: each uses what the network said before.

        variance_noise: instead of drawing by the generator. prev_sample: instead of drawing at all, to ask for the
        log_prob of a draw made before. Without a generator, the first sample of the run seeds the noise. Other
        arguments that pipelines pass (eta) are ignored.
        """
        if self._run is None:
            raise ValueError("call set_timesteps before the first step")
        made = self._run.step(
            model_output, whole_timestep(timestep) + 1, sample, generator, variance_noise, prev_sample
        )
        return made if return_dict else (made.prev_sample, made.pred_original_sample)

    def _begin(
        self, noise: MultistepNoise, data_range: tuple[float, float] | None, device: str | torch.device | None
    ) -> None:
        """Take the times of a trajectory, and forget the last run."""
        self._run = MultistepRun(noise, self.config.prediction_type, data_range)
        self.num_inference_steps = len(noise.trajectory)
        times = noise.trajectory.diffusers_timesteps(self.schedule)
        self.timesteps = torch.tensor(times, dtype=torch.long, device=device)


class BridgeScheduler(_Multistep, SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Sample by Bridge 2M in a diffusers pipeline: five to ten steps, nothing to fit.

    The first arguments are diffusers' own, so that `BridgeScheduler.from_config(pipeline.scheduler.config)` works.
    clip_sample: whether the last x0_hat is clipped. Pipelines of images clip by themselves.
    bridge_eta: the share of noise. It has its own name, so that the eta of another scheduler's config does not set it.
    bridge_image_shape: (C, H, W) of the data that is drawn. Small images start at less noise, which saves steps. None
    means large images.
    bridge_first_sigma: the noise-to-signal ratio where the last step starts.

    >>> from diffusers import DDPMScheduler
    >>> scheduler = BridgeScheduler.from_config(DDPMScheduler().config)
    >>> scheduler.set_timesteps(5)
    >>> len(scheduler.timesteps)
    5
    """

    _compatibles = [e.name for e in KarrasDiffusionSchedulers]  # noqa: RUF012, as diffusers declares it

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 1e-4,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: list[float] | None = None,
        prediction_type: str = "epsilon",
        clip_sample: bool = False,
        clip_sample_range: float = 1.0,
        thresholding: bool = False,
        rescale_betas_zero_snr: bool = False,
        bridge_eta: float = ETA,
        bridge_image_shape: list[int] | None = None,
        bridge_first_sigma: float = FIRST_SIGMA,
    ):
        self._read_betas()
        few_step_times(self.schedule, 1, first_sigma=bridge_first_sigma)  # refuses a wrong one
        BridgeNoise(self.schedule, Trajectory((num_train_timesteps,)), bridge_eta)  # refuses a wrong one
        check_sides("bridge_image_shape", bridge_image_shape)
        self.timesteps = torch.arange(num_train_timesteps - 1, -1, -1)
        self.num_inference_steps = None
        self._run = None

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Take Karras times, and forget the last run."""
        shape, first = self.config.bridge_image_shape, self.config.bridge_first_sigma
        times = few_step_times(self.schedule, num_inference_steps, shape, first)
        most = self.config.clip_sample_range
        data_range = (-most, most) if self.config.clip_sample else None
        self._begin(BridgeNoise(self.schedule, times, self.config.bridge_eta), data_range, device)


class MatchedScheduler(_Multistep, SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Sample by Matched 2M in a diffusers pipeline.

    The matched noise is not part of the config. After a pipeline is saved and loaded, call `attach` again.

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
        self.num_inference_steps = None
        self._known: dict[int, MatchedNoise] = {}
        self._run = None

    def use(self, noises: Sequence[MatchedNoise]) -> None:
        """Use these matched noises, one for each number of steps. Those of other schedules are left out."""
        here = self.schedule.digest()
        self._known = {len(noise.trajectory): noise for noise in noises if noise.schedule.digest() == here}

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Take the times measured for this number of steps, and forget the last run."""
        if num_inference_steps not in self._known:
            known = ", ".join(map(str, sorted(self._known))) or "none"
            raise ValueError(
                f"there is no matched noise for {num_inference_steps} steps (there is for: {known}); measure it by "
                f"bundle.with_matched_noise(images, steps={num_inference_steps}), then attach the bundle again"
            )
        data_range = None if self.config.data_range is None else tuple(self.config.data_range)
        self._begin(self._known[num_inference_steps], data_range, device)


def _prepare(scheduler: FlowMatchBridgeScheduler) -> None:
    refuse_churn(scheduler.config)
    BridgeNoise(scheduler.schedule, Trajectory((1.0,)), scheduler.config.bridge_eta)  # refuses a wrong one


class FlowMatchBridgeScheduler(FlowTimes, FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Sample a model of flow matching by Bridge 2M in a diffusers pipeline, at the pipeline's own times.

    Its settings are those of FlowMatchEulerDiscreteScheduler, and bridge_eta, the share of noise.

    >>> FlowMatchBridgeScheduler(shift=3.0).config.bridge_eta
    0.3
    """

    schedule: Schedule = Schedule.flow()
    _run: MultistepRun | None = None
    __init__ = extended(FlowMatchEulerDiscreteScheduler, MappingProxyType({"bridge_eta": ETA}), _prepare)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Choose the times to visit, as diffusers does, and forget the last run."""
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        self._times = [min(float(sigma), 1.0) for sigma in self.sigmas.double().cpu()]
        self._run = MultistepRun(
            BridgeNoise(self.schedule, Trajectory(self._times[-2::-1]), self.config.bridge_eta), "flow_prediction"
        )

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        variance_noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
        **ignored: Any,
    ) -> MultistepOutput | tuple[Tensor, ...]:
        """Go from timestep to the next one, as `BridgeScheduler.step` does."""
        refuse_tokens(ignored)
        if self._run is None:
            raise ValueError("call set_timesteps before the first step")
        begins = self.step_index is None and prev_sample is None
        place = place_of_step(self, timestep, moves=prev_sample is None)
        if begins:
            self._run.first = place
        made = self._run.step(model_output, self._times[place], sample, generator, variance_noise, prev_sample)
        if prev_sample is None:
            self._step_index += 1
        return made if return_dict else (made.prev_sample, made.pred_original_sample)
