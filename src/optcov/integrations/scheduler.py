"""The reverse step as a diffusers scheduler. `ReverseProcess` computes its mean and covariance.

diffusers counts times 0..N-1, so its t is our t - 1. The config uses both: `timesteps` are diffusers' times, while the
times of `trajectories` and the indices of the numbers per time are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from torch import Tensor

from optcov.covariances import BothUnits, Bounds, PerTime
from optcov.gaussian import per_sample
from optcov.integrations.stepping import (
    DiscreteTimes,
    OptimalCovarianceSchedulerOutput,
    Stepper,
    our_times,
    whole_timestep,
)
from optcov.sampling import LAST_STEPS
from optcov.schedule import Schedule
from optcov.trajectory import Trajectory


class OptimalCovarianceScheduler(DiscreteTimes, SchedulerMixin, ConfigMixin):  # type: ignore[misc]
    """Sample with the optimal covariance in a diffusers pipeline.

    The first arguments are diffusers' own, so that `from_config(pipeline.scheduler.config, covariance=...)` works. For
    latents, pass clip_sample=False if that config does not. The other arguments:

    covariance: "beta_tilde" | "beta" | "analytic" | "npr_isotropic" work with an unchanged network. "sn" | "npr" |
    "ocm" | "range" read the second half of an output of 2C channels (see `UNetWithHead`).
    head_unit, head_about: what that second half estimates, as in `Head.unit` and `Head.about`.
    eta: 1 is DDPM's forward process, 0 is DDIM's. It overrides the eta that a pipeline passes to `step`.
    mean_square_noise, mean_square_residual: N + 1 numbers, indexed by our time, for "analytic" and "npr_isotropic".
    velocity_numbers: the same variance in velocity units, for a time with zero terminal SNR.
    clip_mean: False clips x0_hat in the last step only. Variances are bounded either way.
    noise_cap: the paper's y, in 8-bit levels. It caps the step before the last.
    last_step: "mean" | "draw".
    trajectories: a dict from the number of steps to our times, ascending. `set_timesteps(n)` uses them instead of even
    times.
    link: the name under which a network of `optcov.attach` leaves the head's output. None: the output is in the
    channels.
    guided_half: "second" | "first": where the pipeline puts the conditional half of a guided batch.
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
        clip_sample: bool = True,
        clip_sample_range: float = 1.0,
        thresholding: bool = False,
        rescale_betas_zero_snr: bool = False,
        covariance: str = "beta_tilde",
        head_unit: str = "noise",
        head_about: str = "zero",
        eta: float = 1.0,
        use_clipped_model_output: bool | None = None,
        mean_square_noise: list[float] | None = None,
        mean_square_residual: list[float] | None = None,
        noise_cap: float | None = None,
        last_step: str = "mean",
        trajectories: dict[str, list[int]] | None = None,
        link: str | None = None,
        guided_half: str = "second",
        clip_mean: bool = True,
        velocity_numbers: list[float] | None = None,
    ):
        self._read_betas()
        if last_step not in LAST_STEPS:
            raise ValueError(f"last_step = {last_step!r} is not one of {', '.join(LAST_STEPS)}")
        self._stepper = Stepper(
            self.schedule,
            self.config,
            (-clip_sample_range, clip_sample_range) if clip_sample else None,
            {
                "mean_square_noise": _per_time(mean_square_noise, velocity_numbers),
                "mean_square_residual": _per_time(mean_square_residual, velocity_numbers),
            },
        )
        self._trajectories = _check_trajectories(trajectories or {}, self.schedule)
        self.num_inference_steps: int | None = None
        self._follow(Trajectory(range(1, num_train_timesteps + 1)), None)

    @property
    def bounds(self) -> Bounds:
        """Counts how many variances of the steps so far were out of bounds."""
        return self._stepper.process.bounds

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Choose the times to visit: pass how many, or the times themselves (diffusers' times, descending).

        n steps visit the times of `trajectories` in the config. If it has none for n, they visit evenly spaced times
        from N-1 to 0. A single step starts at N-1.
        """
        if (num_inference_steps is None) == (timesteps is None):
            raise ValueError("pass either num_inference_steps or timesteps, not both")
        if timesteps is not None:
            trajectory = _trajectory_of([whole_timestep(t) + 1 for t in reversed(list(timesteps))], self.schedule)
        else:
            assert num_inference_steps is not None
            trajectory = self._trajectory(num_inference_steps)
        self.num_inference_steps = len(trajectory)
        self._stepper.begin()
        self._follow(trajectory, device)

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        eta: float | None = None,
        use_clipped_model_output: bool | None = None,
        variance_noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
    ) -> OptimalCovarianceSchedulerOutput | tuple[Tensor, Tensor, Tensor | None]:
        """Go from timestep to the next one, and return the estimate of x_0, too.

        model_output: (B, C, H, W), or (B, 2C, H, W) with a head.
        generator: draws the noise. Without one, the first sample of the run seeds the noise.
        variance_noise: use this noise instead of drawing it.
        prev_sample: an earlier draw. Nothing is drawn then, and log_prob is that of this draw.
        eta, use_clipped_model_output: accepted because pipelines pass them, but ignored. The config decides.
        """
        t = whole_timestep(timestep) + 1
        if t not in self._next_time:
            raise ValueError(f"timestep {t - 1} is not one of this run's; call set_timesteps, then step at them")
        made = self._stepper.step(
            *(model_output, sample, t, self._next_time[t], self._first_time), *(generator, variance_noise, prev_sample)
        )
        return made if return_dict else (made.prev_sample, made.pred_original_sample, made.pred_original_variance)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The target of v-prediction, sqrt(alpha_bar) noise - sqrt(beta_bar) x_0."""
        t = our_times(timesteps)
        signal, spread = self.schedule.alpha_bar(t).sqrt(), self.schedule.beta_bar(t).sqrt()
        return per_sample(signal, sample) * noise - per_sample(spread, sample) * sample

    def _follow(self, trajectory: Trajectory, device: str | torch.device | None) -> None:
        steps = [(int(t), int(s)) for t, s in trajectory.descending()]
        self._next_time, self._first_time = dict(steps), steps[-1][0]
        self.timesteps = torch.tensor([t - 1 for t, _ in steps], dtype=torch.long, device=device)

    def _trajectory(self, steps: int) -> Trajectory:
        if steps in self._trajectories:
            return self._trajectories[steps]
        if steps == 1:
            return Trajectory((len(self),))
        return Trajectory.even(self.schedule, steps)


def _per_time(numbers: Sequence[float] | None, velocity: Sequence[float] | None) -> PerTime | None:
    if numbers is None:
        return None
    in_noise = torch.tensor(numbers, dtype=torch.float64)
    return in_noise if velocity is None else BothUnits(in_noise, torch.tensor(velocity, dtype=torch.float64))


def _trajectory_of(times: Sequence[int], schedule: Schedule) -> Trajectory:
    trajectory = Trajectory(times)
    for t in trajectory.times:
        schedule.check_times(t)
    return trajectory


def _check_trajectories(stored: Mapping[str, Sequence[int]], schedule: Schedule) -> dict[int, Trajectory]:
    trajectories = {int(steps): _trajectory_of(times, schedule) for steps, times in stored.items()}
    for steps, trajectory in trajectories.items():
        if len(trajectory) != steps:
            raise ValueError(f"the trajectory for {steps} steps has {len(trajectory)} times; its key must be that")
    return trajectories
