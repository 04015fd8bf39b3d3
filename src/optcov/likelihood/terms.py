"""The three kinds of terms of -ELBO, each for a batch of images at one time, in nats and float64.

    prior            KL(q(x_T | x_0) || p(x_T))
    transition       KL(q(x_s | x_t, x_0) || p(x_s | x_t))
    reconstruction   -log p(x_0 | x_t)

One definition of each serves `elbo` and the table of costs. The network sees x_t in its own precision; what follows is
float64, because r - log r - 1 and the difference of two means lose too many digits otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess, first_step_variance
from optcov.gaussian import Correlated, CovarianceShape, Gaussian, Isotropic, Spectral, kl_divergence, sum_pixels
from optcov.likelihood.discretised import bin_half_width, discretised_log_prob
from optcov.noise import batch_noise
from optcov.prediction import Prediction
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule

LEAST_ETA = 1e-9  # the bound is then beyond 10^15 bits per dimension
LAST_VARIANCES: Final = ("paper", "own", "reference_table")
NoiseByTime = Callable[[float], Tensor]


@final
@dataclass(frozen=True)
class Observation:
    """Images, and what the network says of their noisy versions at one time; all float64."""

    x_0: Tensor  # (B, *D)
    prediction: Prediction  # of x_t at a time t

    @property
    def t(self) -> float:
        """The time."""
        return float(self.prediction.t)


def observe(
    process: ReverseProcess, x_0: Tensor, t: float, noise: Tensor, condition: Mapping[str, Tensor] | None = None
) -> Observation:
    """Diffuse images to time t and ask the network about them, once."""
    if not isinstance(noise, Tensor):
        raise ValueError(
            f"the supplied noise is a {type(noise).__name__}, not a torch tensor of shape {tuple(x_0.shape)}"
        )
    x_t = process.forward.diffuse(x_0, t, noise.to(x_0.device, x_0.dtype))
    prediction = process.predict(x_t, t, **(condition or {}))
    sums = [output.sum() for output in (prediction.output, *prediction.heads.values())]
    if not bool(torch.stack(sums).isfinite().all()):  # cheaper than to look at every pixel, which names the samples
        prediction.require_finite()
    return Observation(x_0.double(), prediction.double())


def seeded_noise(
    schedule: Schedule, seed: int, images: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> NoiseByTime:
    """Noise that depends on (seed, image, time) alone."""
    return lambda t: batch_noise(seed, images, schedule.stream(t), shape, dtype)


def prior_cost(forward: ForwardProcess, x_0: Tensor) -> Tensor:
    """KL(q(x_T | x_0) || N(0, (alpha_bar + beta_bar) I)), (B,); that variance is 1 if the process preserves it."""
    schedule = forward.schedule
    T = schedule.final_time
    alpha_bar, beta_bar = schedule.alpha_bar(T), schedule.beta_bar(T)
    x_0 = x_0.double()
    return kl_divergence(
        Gaussian(alpha_bar.sqrt() * x_0, Isotropic(beta_bar)),
        Gaussian(torch.zeros_like(x_0), Isotropic(alpha_bar + beta_bar)),
    )


def transition_cost(process: ReverseProcess, seen: Observation, s: float) -> Tensor:
    """KL from the true bridge to the model's step, (B,); s > 0."""
    bridge = process.forward.bridge(seen.t, s)
    mean = bridge.clean_weight * seen.x_0 + bridge.noisy_weight * seen.prediction.x_t
    true_step = Gaussian(mean, Isotropic(bridge.variance))
    return kl_divergence(true_step, process.step_from(seen.prediction, s))


def reconstruction_cost(
    process: ReverseProcess, seen: Observation, last_variance: str = "paper", cdf: str = "exact"
) -> Tensor:
    """-log p(x_0 | x_t), (B,)."""
    step = process.step_from(seen.prediction, 0)
    covariance: CovarianceShape
    if last_variance == "own":
        covariance = floored(step.covariance, step.mean, process.data_range)
    else:
        covariance = Isotropic(fixed_last_variance(process.forward, seen.t, last_variance))
    return last_step_cost(seen.x_0, Gaussian(step.mean, covariance), process.data_range, cdf)


def last_step_cost(x_0: Tensor, step: Gaussian, data_range: tuple[float, float] | None, cdf: str) -> Tensor:
    """-log p(x_0), (B,): by a discretised Gaussian for data in a range, by a density for unbounded data."""
    if data_range is None:
        return -step.log_prob(x_0)
    if isinstance(step.covariance, Correlated | Spectral):
        raise ValueError(
            "a covariance that correlates pixels has no probability of 8-bit bins, which are single pixels; score it "
            'with last_variance="paper", or data without a data_range'
        )
    # A full covariance is scored by its marginals, because bins are per pixel.
    return -sum_pixels(discretised_log_prob(x_0, step.mean, step.variance, data_range, cdf))


def floored(covariance: CovarianceShape, like: Tensor, data_range: tuple[float, float] | None) -> CovarianceShape:
    """Raise variances to at least that of rounding to 8 bits, so that a last step has a density."""
    return covariance.floored(bin_half_width(data_range or (-1, 1)) ** 2 / 3, like)


def fixed_last_variance(forward: ForwardProcess, t: float, last_variance: str) -> Tensor:
    """The last step's variance where the covariance has no say in it, ().

    "paper" is beta-tilde(1|2) at every t. "reference_table" is what the authors' tables of costs use, beta_bar_t but
    for the first time; it exists only to reproduce them.
    """
    if last_variance == "reference_table" and t != forward.schedule.small_step:
        return forward.schedule.beta_bar(t)
    return first_step_variance(forward.schedule)


def check_last_variance(last_variance: str) -> str:
    """Return the name, or raise a ValueError that lists the known ones."""
    if last_variance not in LAST_VARIANCES:
        raise ValueError(f"unknown last_variance {last_variance!r}; choose one of {', '.join(LAST_VARIANCES)}")
    return last_variance


def check_images(x_0: Tensor, data_range: tuple[float, float] | None) -> None:
    """Refuse images that are not a floating-point batch, not finite, or outside the data range."""
    if not isinstance(x_0, Tensor):
        raise ValueError(f"x_0 is a {type(x_0).__name__}, not a torch tensor; convert it by torch.as_tensor")
    if x_0.ndim < 2 or not x_0.is_floating_point() or x_0.shape[0] == 0:
        raise ValueError(
            f"x_0 must be a non-empty floating-point tensor (B, *D), got {x_0.dtype} of shape {tuple(x_0.shape)}"
        )
    if not bool(x_0.isfinite().all()):
        raise ValueError("x_0 has NaN or infinite values; clean the data first")
    if data_range is not None:
        low, high = float(x_0.min()), float(x_0.max())
        slack = 1e-3 * (data_range[1] - data_range[0])
        if low < data_range[0] - slack or high > data_range[1] + slack:
            raise ValueError(
                f"x_0 runs from {low:.4g} to {high:.4g}, outside the data range {tuple(data_range)}; scale the images "
                f"to it, or pass data_range=None for unbounded data"
            )


def check_stochastic(forward: ForwardProcess) -> None:
    """Refuse eta = 0, where the bound is infinite, and what float64 does not tell from it."""
    if forward.eta == 0:
        raise ValueError(
            "at eta = 0 the variational bound is infinite: the forward process is deterministic given x_0, so its KL "
            "divergence to any Gaussian step diverges; use eta in (0, 1], or the probability-flow ODE likelihood"
        )
    if forward.eta < LEAST_ETA:
        raise ValueError(
            f"eta = {forward.eta} is so small that the variational bound, which grows with 1 / eta^2, is no longer a "
            f"number; use eta of at least {LEAST_ETA:g}"
        )
