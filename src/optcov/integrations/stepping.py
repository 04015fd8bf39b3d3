"""One reverse step of a scheduler of discrete or continuous times: the posterior, the draw, and its log-probability."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from optcov.covariances import find_covariance
from optcov.forward import ForwardProcess
from optcov.gaussian import LOG_2_PI, Gaussian
from optcov.identity import digest_tensors
from optcov.integrations import mailbox
from optcov.prediction import PARAMETERISATIONS, Prediction
from optcov.reverse import ReverseProcess
from optcov.sampling import capped, variance_cap
from optcov.schedule import Schedule, check_number, check_whole, is_whole
from optcov.text_table import in_one_line
from optcov.watch import not_finite

SHIFTS = {"shift", "base_shift", "max_shift", "use_dynamic_shifting"}  # what schedulers of flow matching set
SIGMAS = {"sigma_min", "sigma_max", "sigma_data"}  # what schedulers of variance-exploding processes set
BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")


@dataclass
class OptimalCovarianceSchedulerOutput(BaseOutput):  # type: ignore[misc]
    """What a step returns."""

    prev_sample: Tensor  # x_s, (B, C, H, W)
    pred_original_sample: Tensor  # mean of x_0 given x_t, in the data range if clip_mean, (B, C, H, W)
    pred_original_variance: Tensor | None = None  # variance of x_0 given x_t, (B, C, H, W); None for "range"
    log_prob: Tensor | None = None  # log-density of prev_sample in nats, (B,); None where nothing is drawn


class DiscreteTimes:
    """The common part of schedulers with discrete times. diffusers counts times 0..N-1, so its t is our t - 1."""

    order = 1
    init_noise_sigma = 1.0
    schedule: Schedule
    config: Any

    betas: Tensor | None
    alphas_cumprod: Tensor

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build a scheduler from the config of a scheduler with betas; configs of other processes are refused."""
        if isinstance(config, Mapping):
            _refuse_other_processes({**config, **kwargs})
        return super().from_config(config, return_unused_kwargs, **kwargs)  # type: ignore[misc]

    def _read_betas(self) -> None:
        """Take the schedule from the config."""
        _check_betas(self.config)
        self.betas = None  # Schedule.from_diffusers asks for it, but reads the config
        self.schedule = Schedule.from_diffusers(self)
        self.betas = self.schedule.betas
        self.alphas_cumprod = self.schedule.alpha_bar(self.schedule.full_grid())

    def __len__(self) -> int:
        return int(self.config.num_train_timesteps)

    def scale_model_input(self, sample: Tensor, timestep: int | Tensor | None = None) -> Tensor:
        """Return the sample as it is: a variance-preserving process needs no scaling."""
        return sample

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Make x_t from x_0 (B, C, H, W) and noise, at one timestep or one per sample."""
        return ForwardProcess(self.schedule).diffuse(original_samples, our_times(timesteps), noise)


def _refuse_other_processes(config: Mapping[str, Any]) -> None:
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


def _check_betas(config: Mapping[str, Any]) -> None:
    """Refuse a schedule or a prediction that has no meaning here."""
    kind, trained = config["beta_schedule"], config["trained_betas"]
    if trained is None and kind not in BETA_SCHEDULES:
        raise ValueError(
            f"beta_schedule = {kind!r} is not one of {', '.join(BETA_SCHEDULES)}; pass the betas as trained_betas"
        )
    steps = check_whole("num_train_timesteps", config["num_train_timesteps"], 1)
    if config["clip_sample"] and not check_number("clip_sample_range", config["clip_sample_range"]) > 0:
        raise ValueError(f"clip_sample_range = {config['clip_sample_range']} is not positive; the usual one is 1.0")
    if trained is not None and len(trained) != steps:
        raise ValueError(f"there are {len(trained)} trained_betas, but num_train_timesteps = {steps}")
    if config["thresholding"]:
        raise ValueError("thresholding=True has no counterpart here; use clip_sample, or neither for latents")
    predicts, known = config["prediction_type"], [kind for kind in PARAMETERISATIONS if kind != "flow_prediction"]
    if predicts == "flow_prediction":
        raise ValueError(
            "prediction_type = 'flow_prediction' is that of flow matching, which has no betas; take "
            "FlowMatchBridgeScheduler or FlowMatchOptimalCovarianceScheduler"
        )
    if predicts not in known:
        raise ValueError(f"prediction_type = {predicts!r:.80} is not one of {', '.join(known)}; pass one of them")


def whole_timestep(timestep: Any) -> int:
    """Return a diffusers timestep as an int, or raise a ValueError."""
    value = timestep.item() if isinstance(timestep, Tensor) and timestep.numel() == 1 else timestep
    if not is_whole(value):
        raise ValueError(
            f"timestep = {in_one_line(value)} is not a whole number; pass one of 0..N-1, as diffusers counts them"
        )
    return int(value)


def our_times(timesteps: Tensor) -> Tensor:
    """Turn diffusers' times into ours, () or (B,)."""
    return (timesteps.reshape(()) if timesteps.numel() == 1 else timesteps) + 1


@final
class Stepper:
    """The reverse process of a scheduler's config. It steps by network outputs that the pipeline has computed already.

    per_time: the numbers per time by name, for covariances that need them.
    """

    def __init__(
        self,
        schedule: Schedule,
        config: Mapping[str, Any],
        data_range: tuple[float, float] | None,
        per_time: Mapping[str, Any],
    ):
        self.schedule, self.config = schedule, config
        if find_covariance(config["covariance"]).spectrum is not None:
            raise ValueError(
                f"covariance {config['covariance']!r} correlates pixels by a spectrum, which no config of a scheduler "
                f"can hold; sample by bundle.sample"
            )
        self.process = ReverseProcess(
            _no_network,
            ForwardProcess(schedule, config["eta"]),
            config["covariance"],
            data_range,
            config["use_clipped_model_output"],
            config.get("clip_mean", True),
            **per_time,
        )
        self._variance_cap = variance_cap(self.process, config["noise_cap"])
        self.draws = not (config["covariance"] == "beta_tilde" and config["eta"] == 0)
        self._drawing = RunNoise()

    def begin(self) -> None:
        """Forget the state of the previous run."""
        self._drawing = RunNoise()
        if self.config["link"] is not None:
            mailbox.empty(self.config["link"])

    def step(
        self,
        model_output: Tensor,
        sample: Tensor,
        t: float,
        s: float,
        first_time: float,
        generator: Any = None,
        noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
    ) -> OptimalCovarianceSchedulerOutput:
        """Go from t to s.

        noise: use this noise instead of drawing it.
        prev_sample: an earlier draw. Nothing is drawn then, and log_prob is that of this draw.
        """
        prediction = self._prediction(model_output, sample, t)
        posterior = self.process.covariance.posterior(prediction, self.process.bounds)
        step = self.process.step_from(prediction, s, posterior)
        if s == first_time:
            step = capped(step, self._variance_cap)
        log_prob = None
        check_draw(prev_sample, sample, noise)
        if self.draws and (s > 0 or self.config["last_step"] == "draw"):
            if prev_sample is None:
                noise = self._drawing.draw(sample, model_output.dtype, generator) if noise is None else noise
                prev_sample = step.sample(noise.to(step.mean.dtype))
            x_s = prev_sample.to(sample.dtype)
            log_prob = log_density(step, x_s)
        else:
            x_s = (step.mean if prev_sample is None else prev_sample).to(sample.dtype)
        if s == 0:
            require_finite(x_s)  # read once, at the end of a run
        known = self.process.covariance.has_posterior
        variance = posterior.variance.expand_as(posterior.mean).to(sample.dtype) if known else None
        return OptimalCovarianceSchedulerOutput(x_s, posterior.mean.to(sample.dtype), variance, log_prob)

    def _prediction(self, model_output: Tensor, sample: Tensor, t: float) -> Prediction:
        """What the network says of the sample, in the precision to compute in."""
        check_output(model_output, sample)
        kind, covariance, channels = self.config["prediction_type"], self.config["covariance"], sample.shape[1]
        head, link = find_covariance(covariance).head, self.config["link"]
        in_channels = head is not None and link is None
        taken = (2 * channels,) if in_channels else (channels, 2 * channels)
        if sample.ndim == 4 and model_output.shape[1] not in taken:
            raise ValueError(
                f"covariance {covariance!r} needs an output of {taken[0]} channels, but the network returned "
                f"{model_output.shape[1]}; {_CHANNEL_REMEDY if in_channels else 'use a network that fits'}"
            )
        # other outputs than noise become x_0 again in the step: in float64 without loss, however little signal is left
        exact = kind != "epsilon" and sample.device.type != "mps"
        dtype = torch.float64 if exact else torch.promote_types(sample.dtype, torch.float32)
        x_t, raw = sample.to(dtype), model_output.to(dtype)
        prediction = Prediction(x_t, t, raw[:, :channels], kind, *self.schedule.levels(t))
        if head is None:
            return prediction
        said = raw[:, channels:] if link is None else mailbox.take(link, sample, self.config["guided_half"]).to(dtype)
        excesses = [head] if self.config["head_about"] == "prediction" else []
        return prediction.with_heads({head: said}, {head: self.config["head_unit"]}, excesses)


@final
class RunNoise:
    """The noise of one run of a pipeline, from its generator.

    Some pipelines (SD3, Flux, DiT) use their generator for the first noise only. Then the first noise seeds all others,
    so that fixing the first fixes them all.
    """

    def __init__(self) -> None:
        self._own: torch.Generator | None = None

    def draw(self, sample: Tensor, dtype: torch.dtype, generator: Any = None) -> Tensor:
        """Draw standard normal noise shaped like the sample."""
        if generator is None:
            if self._own is None:
                known = digest_tensors({"first": sample.detach().float().cpu()})
                self._own = torch.Generator().manual_seed(int(known[:15], 16))
            generator = self._own
        noise: Tensor = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=dtype)
        return noise


def log_density(step: Gaussian, x_s: Tensor) -> Tensor:
    """The log-density of a draw, (B,), in nats; infinite where a pixel has no variance. The draw gets no gradient.

    A draw with NaN or infinity has log-density minus infinity.
    """
    with torch.set_grad_enabled(step.mean.requires_grad):
        off = x_s.detach().to(step.mean.dtype) - step.mean
        quadratic = step.covariance.inverse_quadratic(off)
        size = math.prod(off.shape[1:])
        found = -0.5 * (quadratic + step.covariance.log_det(step.mean) + size * LOG_2_PI)
    return torch.where(not_finite(off), -torch.inf, torch.where(found.isnan(), torch.inf, found))


def check_output(model_output: Tensor, sample: Tensor) -> None:
    """Refuse a network output of the wrong kind or shape, or with NaN or infinity."""
    for name, value in (("model_output", model_output), ("sample", sample)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; pass a tensor")
        if value.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; pass a batch of images, (B, C, H, W)")
    if not sample.is_floating_point() or not model_output.is_floating_point():
        raise ValueError(f"sample and output are {sample.dtype} and {model_output.dtype}; pass floating point")
    if (len(model_output), *model_output.shape[2:]) != (len(sample), *sample.shape[2:]):
        raise ValueError(
            f"the network returned shape {tuple(model_output.shape)} for a sample of shape {tuple(sample.shape)}; "
            f"they may differ in their channels only"
        )
    require_finite(model_output, "the network answered samples {} by")


def check_draw(prev_sample: Tensor | None, sample: Tensor, noise: Tensor | None = None) -> None:
    """Refuse an earlier draw that does not fit the sample, and noise that is no tensor."""
    for name, value in (("prev_sample", prev_sample), ("variance_noise", noise)):
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; pass a tensor like the sample, or leave it out")
    if prev_sample is not None and prev_sample.shape != sample.shape:
        raise ValueError(
            f"prev_sample has shape {tuple(prev_sample.shape)}, but the sample {tuple(sample.shape)}; pass the draw "
            f"that was made from it"
        )


_CHANNEL_REMEDY = (
    "wrap it with its head: optcov.integrations.diffusers.attach(pipeline, bundle, method), or UNetWithHead.wrap"
)


def _no_network(x_t: Tensor, t: Any) -> NoReturn:
    raise AssertionError("in a pipeline the network has run before the scheduler steps")


def require_finite(values: Tensor, said: str = "samples {} ended as") -> None:
    """Refuse values (B, *D) that hold NaN or infinity; said: what became of the samples whose numbers stand for {}."""
    bad = not_finite(values)
    if bool(bad.any()):
        samples = bad.nonzero().flatten().tolist()
        numbers = f"{samples[:10]}{' and others' if len(samples) > 10 else ''}"
        raise ValueError(
            f"{said.format(numbers)} NaN or infinity; check the network's input scale, weights and precision"
        )
