"""The likelihood of the probability-flow ODE, for continuous schedules (Appendix of score-based models).

With y = x / sqrt(alpha_bar) and the noise-to-signal ratio sigma = sqrt(beta_bar / alpha_bar), the flow is
dy / d sigma = eps_hat, so that

    log p(x_0) = log p(y_T) + integral of the divergence of eps_hat by y over sigma

up to the change of variables at both ends. We integrate over tau = sqrt(t), in which sigma is smooth down to t = 0. The
divergence is estimated by one random probe per image (Hutchinson): unbiased for the log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from optcov.gaussian import LOG_2_PI, sum_pixels
from optcov.likelihood.discretised import bin_half_width
from optcov.likelihood.statistics import Estimate, estimate
from optcov.likelihood.terms import check_images
from optcov.noise import image_generator
from optcov.prediction import Network
from optcov.schedule import Schedule, VESchedule, VPSchedule

PROBES: Final = ("rademacher", "gaussian")
_PROBE_STREAM, _DEQUANTISATION_STREAM = -1, -2  # apart from the times of a sweep


@final
@dataclass(frozen=True)
class OdeLikelihood:
    """Log-likelihood of each image under the probability flow."""

    log_density: Tensor  # log p(x_0 + dequantisation noise), in nats, (B,), float64
    dimensions: int
    bin_width: float | None  # of the dequantised data; None for continuous data
    evaluations: int  # of the network, for the whole batch

    def bits_per_dim(self) -> Tensor:
        """Bits per dimension, (B,): for 8-bit data an upper bound in expectation, by uniform dequantisation."""
        nats = self.log_density + self.dimensions * math.log(self.bin_width or 1.0)
        return -nats / (self.dimensions * math.log(2))

    def estimate(self) -> Estimate:
        """Mean bits per dimension with its standard error over images."""
        return estimate(self.bits_per_dim())


def ode_likelihood(
    network: Network,
    schedule: Schedule,
    x_0: Tensor,
    data_range: tuple[float, float] | None = (-1, 1),
    *,
    probe: str = "rademacher",
    rtol: float = 1e-5,
    atol: float = 1e-5,
    start_time: float = 1e-5,
    seed: int = 0,
    images: Sequence[int] | None = None,
) -> OdeLikelihood:
    """Integrate the probability flow from x_0 (B, *D) at start_time to the final time.

    With a data_range, x_0 is 8-bit data on its 256 values and gets noise uniform over a bin (dequantisation); without
    one it is scored as it is. probe: "rademacher" or "gaussian". seed and images (0..B-1 unless told) fix probes and
    dequantisation. rtol, atol: of torchdiffeq's dopri5. Nothing is clipped. The network must be differentiable.
    """
    from torchdiffeq import odeint

    if probe not in PROBES:
        raise ValueError(f"unknown probe {probe!r}; choose one of {', '.join(PROBES)}")
    if not 0 <= start_time < 1:
        raise ValueError(f"start_time = {start_time} is outside [0, 1)")
    check_images(x_0, data_range)
    numbers = range(len(x_0)) if images is None else images
    if data_range is not None:
        x_0 = x_0 + bin_half_width(data_range) * _uniform(seed, numbers, x_0)
    flow = _Flow(network, schedule, _probes(probe, seed, numbers, x_0))
    signal = _signal(schedule, start_time)
    start = (x_0.double() / signal, torch.zeros(len(x_0), dtype=torch.float64, device=x_0.device))
    span = torch.tensor([math.sqrt(start_time), 1.0], dtype=torch.float64, device=x_0.device)
    y, divergence = odeint(flow, start, span, rtol=rtol, atol=atol, method="dopri5")
    x_T = y[-1] * _signal(schedule, 1.0)
    prior_variance = float(schedule.alpha_bar(1.0) + schedule.beta_bar(1.0))
    d = x_0[0].numel()
    log_prior = -0.5 * (sum_pixels(x_T.square()) / prior_variance + d * (LOG_2_PI + math.log(prior_variance)))
    rescaling = d * (math.log(_signal(schedule, 1.0)) - math.log(signal))  # from x to y at both ends
    return OdeLikelihood(
        log_density=log_prior + divergence[-1] + rescaling,
        dimensions=d,
        bin_width=None if data_range is None else 2 * bin_half_width(data_range),
        evaluations=flow.evaluations,
    )


@final
class _Flow:
    """d(y, divergence) / d tau; counts the evaluations of the network."""

    def __init__(self, network: Network, schedule: Schedule, probe: Tensor):
        _ratio_rate(schedule, 0.5)  # refuses discrete schedules before the network runs
        self.network, self.schedule, self.probe = network, schedule, probe
        self.evaluations = 0

    def __call__(self, tau: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        t = min(max(float(tau) ** 2, 1e-12), 1.0)
        rate = _ratio_rate(self.schedule, t) * 2 * math.sqrt(t)
        signal = _signal(self.schedule, t)
        with torch.enable_grad():
            x = (signal * state[0]).to(self.probe.dtype).requires_grad_()
            noise = self.network(x, t).noise
            if not noise.requires_grad:
                raise ValueError(
                    "the network's output does not depend on its input by autograd, so its divergence cannot be "
                    "computed; pass a network that runs without torch.no_grad and without detach"
                )
            (product,) = torch.autograd.grad((noise * self.probe).sum(), x)
        self.evaluations += 1
        divergence = signal * sum_pixels((product * self.probe).double())  # by y, not by x
        return rate * noise.detach().double(), rate * divergence


def _signal(schedule: Schedule, t: float) -> float:
    return math.sqrt(float(schedule.alpha_bar(t)))


def _ratio_rate(schedule: Schedule, t: float) -> float:
    """d sigma / dt of sigma = sqrt(beta_bar / alpha_bar)."""
    if not isinstance(schedule, VPSchedule | VESchedule):
        raise ValueError(
            f"{schedule!r} has no real times, so there is no probability flow to integrate; use Schedule.vp_sde() or "
            f"Schedule.ve_sde(), or score by elbo"
        )
    sigma = math.exp(-float(schedule.log_snr(t)) / 2)
    if isinstance(schedule, VPSchedule):
        return float(schedule.beta(t)) * (sigma**2 + 1) / (2 * sigma)
    growth = 2 * math.log(schedule.sigma_max / schedule.sigma_min)
    return growth * (sigma**2 + schedule.sigma_min**2) / (2 * sigma)


def _uniform(seed: int, images: Sequence[int], like: Tensor) -> Tensor:
    """Noise uniform in [-1, 1), by image."""
    drawn = [
        torch.rand(like.shape[1:], generator=image_generator(seed, i, _DEQUANTISATION_STREAM), dtype=like.dtype)
        for i in images
    ]
    return (2 * torch.stack(drawn) - 1).to(like.device)


def _probes(kind: str, seed: int, images: Sequence[int], like: Tensor) -> Tensor:
    """Vectors with unit second moment, by image."""
    drawn = []
    for i in images:
        generator = image_generator(seed, i, _PROBE_STREAM)
        if kind == "gaussian":
            drawn.append(torch.randn(like.shape[1:], generator=generator, dtype=like.dtype))
        else:
            bits = torch.randint(0, 2, tuple(like.shape[1:]), generator=generator)
            drawn.append((2 * bits - 1).to(like.dtype))
    return torch.stack(drawn).to(like.device)
