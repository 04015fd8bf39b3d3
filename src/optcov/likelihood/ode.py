"""The likelihood of the probability-flow ODE, for schedules with real times (Appendix of score-based models).

Let n^2 = alpha_bar + beta_bar, z = x / n, and theta the angle with tangent sqrt(beta_bar / alpha_bar). For every
schedule the flow is dz / d theta = v, with the velocity v = (sqrt(alpha_bar) eps_hat - sqrt(beta_bar) x0_hat) / n. So

    log p(x_0) = log p(z_T) + integral of the divergence of v by z over theta

up to the change of variables at both ends. The angle is pi / 2 where no signal is left, and smaller elsewhere. It is
smooth down to time 0. The divergence is estimated with one probe of random signs per image (Hutchinson). This estimate
of the log-likelihood is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.covariances.jacobian import random_signs
from optcov.gaussian import LOG_2_PI, sum_pixels
from optcov.likelihood.discretised import bin_half_width
from optcov.likelihood.terms import check_images
from optcov.networks.guidance import refuse_guided
from optcov.noise import image_generator, image_numbers
from optcov.prediction import Network, Prediction, check_condition
from optcov.schedule import Schedule

_SMALLEST_ANGLE, _SMALLEST_TIME = 1e-12, 1e-12  # where a network can still be asked
_DEQUANTISATION_STREAM = -2  # apart from the times of a sweep, and from the probe, which has -1


@final
@dataclass(frozen=True)
class OdeLikelihood:
    """Log-likelihood of each image under the probability flow."""

    log_density: Tensor  # log p(x_0 + dequantisation noise), in nats, (B,), float64
    dimensions: int
    bin_width: float | None  # of the dequantised data; None for continuous data
    evaluations: int  # of the network, for the whole batch

    def bits_per_dim(self) -> Tensor:
        """Bits per dimension, (B,). For 8-bit data an upper bound in expectation, because of uniform dequantisation."""
        nats = self.log_density + self.dimensions * math.log(self.bin_width or 1.0)
        return -nats / (self.dimensions * math.log(2))


def ode_likelihood(
    network: Network,
    schedule: Schedule,
    x_0: Tensor,
    data_range: tuple[float, float] | None = (-1, 1),
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    seed: int = 0,
    images: Sequence[int] | None = None,
    condition: Mapping[str, Tensor] | None = None,
) -> OdeLikelihood:
    """Integrate the probability flow from x_0 (B, *D) at the schedule's first time to the final one.

    data_range: with a range, x_0 is 8-bit data, and gets noise that is uniform over one of the 256 bins
    (dequantisation). With None, x_0 is scored as it is.
    seed, images: determine the probes and the dequantisation. images are the image numbers, by default 0..B-1.
    rtol, atol: tolerances of torchdiffeq's dopri5.
    condition: further inputs of the network by name, each a tensor with one entry per image.

    Nothing is clipped. The network must be differentiable.
    """
    from torchdiffeq import odeint

    schedule.require_real_times("the probability flow")
    refuse_guided(network)
    check_images(x_0, data_range)
    condition = check_condition(condition, len(x_0))
    numbers = image_numbers(images, len(x_0))
    if data_range is not None:
        x_0 = x_0 + bin_half_width(data_range) * _uniform(seed, numbers, x_0)
    probe = random_signs(seed, numbers, [0] * len(x_0), 1, x_0.shape[1:])[0]
    flow = _Flow(network, schedule, probe.to(x_0), condition)
    first = schedule.unit_data_std(schedule.first_time)
    start = (x_0.double() / first, torch.zeros(len(x_0), dtype=torch.float64, device=x_0.device))
    angles = [flow.angle(schedule.first_time), flow.angle(schedule.final_time)]
    span = torch.tensor(angles, dtype=torch.float64, device=x_0.device)
    z, divergence = odeint(flow, start, span, rtol=rtol, atol=atol, method="dopri5")
    d = x_0[0].numel()
    # at the end z is standard normal, if data has unit variance; the last term is the change from x to z
    log_prior = -0.5 * (sum_pixels(z[-1].square()) + d * LOG_2_PI)
    return OdeLikelihood(
        log_density=log_prior + divergence[-1] - d * math.log(float(first)),
        dimensions=d,
        bin_width=None if data_range is None else 2 * bin_half_width(data_range),
        evaluations=flow.evaluations,
    )


@final
class _Flow:
    """d(z, divergence) / d theta; counts the evaluations of the network."""

    def __init__(self, network: Network, schedule: Schedule, probe: Tensor, condition: Mapping[str, Tensor]):
        self.network, self.schedule, self.probe, self.condition = network, schedule, probe, condition
        self.evaluations = 0

    def __call__(self, theta: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        t = self.time(float(theta))
        signal, spread = self.schedule.levels(t)
        norm = self.schedule.unit_data_std(t)
        with torch.enable_grad():
            x = (norm * state[0]).to(self.probe.dtype).requires_grad_()
            prediction = Prediction.of(self.network(x, t, **self.condition), x, t, signal, spread)
            if not prediction.output.requires_grad:
                raise ValueError(
                    "the network's output does not depend on its input by autograd, so its divergence cannot be "
                    "computed; pass a network that runs without torch.no_grad and without detach"
                )
            velocity = prediction.combined(-spread / norm, signal / norm)
            (product,) = torch.autograd.grad((velocity * self.probe).sum(), x)
        self.evaluations += 1
        divergence = float(norm) * sum_pixels((product * self.probe).double())  # by z, not by x
        return velocity.detach().double(), divergence

    def angle(self, t: float) -> float:
        """theta of a time."""
        return math.atan(math.exp(-float(self.schedule.log_snr(t)) / 2))

    def time(self, theta: float) -> float:
        """The time of an angle, above 0, where a network can be asked."""
        ratio = math.tan(min(max(theta, _SMALLEST_ANGLE), math.pi / 2))
        t = float(self.schedule.time_at(torch.tensor(-2 * math.log(ratio), dtype=torch.float64)))
        return min(max(t, _SMALLEST_TIME), self.schedule.final_time)


def _uniform(seed: int, images: Sequence[int], like: Tensor) -> Tensor:
    """Noise uniform in [-1, 1), by image."""
    drawn = [
        torch.rand(like.shape[1:], generator=image_generator(seed, i, _DEQUANTISATION_STREAM), dtype=like.dtype)
        for i in images
    ]
    return (2 * torch.stack(drawn) - 1).to(like.device)
