"""Marginal matching: noise that gives a multistep solver the right marginals.

The forward process makes x_s = a_s x_0 + b_s eps. Its mean is a_s E[x_0], and its power in a frequency f is

    a_s^2 P_f + b_s^2,     P_f the variance of (B x_0)_f over the data

A solver in few steps misses both. So a batch of start noises follows the trajectory together, step by step. After each
step, let m_f and q_f be the mean and variance of (B (gamma D + kappa x_t))_f over the batch. Then

    T = a_s^2 P + b_s^2                  the power it should have
    p = max(T - q, floor b_s^2)          the power that is missing, added as noise
    shift = B^T (a_s B E[x_0] - m)       the mean that is missing

The batch goes on with both. After the measurement they are fixed, and serve every image. The floor keeps the step's
density defined.

A batch of a few hundred has random moments of its own, which the measurement must not copy. So its noise is
standardised: in each frequency it has exactly mean 0 and variance 1 over the batch, and no correlation with the value
it is added to. The remaining error is averaged: the ratio of q to T is averaged over rings of similar frequencies.

If a step has more power than T, adding noise does not help. With shrink=True such frequencies are scaled down by

    g = min(1, sqrt((T - floor b_s^2) / q)),   p = T - g^2 q,   shift = B^T (a_s B E[x_0] - g m)

This makes mean and power of x_s exact at every step. It is off by default, because it is not measured on images yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess
from optcov.gaussian import Gaussian
from optcov.gaussian.basis import Basis
from optcov.gaussian.correlated import Spectral
from optcov.identity import digest_tensors
from optcov.noise import batch_noise
from optcov.prediction import Network, Prediction, check_condition
from optcov.progress import track
from optcov.schedule import Schedule, check_number, check_whole
from optcov.solvers.multistep import Predictor, mean_of_step
from optcov.trajectory import Trajectory

FIRST_IMAGE = 2**31  # numbers of the start noises: no image that is drawn has one of them
FLOOR = 1e-4  # least power of a step, as a share of the noise of x_s
RINGS = 14  # per axis of an image
LEAST = 16  # images or start noises below which moments mean nothing


@final
@dataclass(frozen=True, eq=False)
class DataMoments:
    """Mean and power of the data by frequency."""

    mean: Tensor  # B E[x_0], (*D), float64
    power: Tensor  # P, (*D), float64

    @staticmethod
    def of(images: Tensor) -> DataMoments:
        """Compute them from images (n, *D) in the range of the network's data."""
        if not isinstance(images, Tensor) or images.ndim < 2 or not images.is_floating_point():
            found = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"images are {found}; pass a floating-point tensor (n, *D), images in [-1, 1]")
        if len(images) < LEAST:
            raise ValueError(f"{len(images)} images are too few for their power by frequency; pass a few hundred")
        if not bool(images.isfinite().all()):
            raise ValueError("images hold NaN or infinity; remove those")
        frequencies = Basis().transform(images.detach().cpu().double())
        return DataMoments(frequencies.mean(0), frequencies.var(0))

    def at(self, schedule: Schedule, s: float) -> tuple[Tensor, Tensor]:
        """Mean and power of x_s in the forward process."""
        return schedule.alpha_bar(s).sqrt() * self.mean, schedule.alpha_bar(s) * self.power + schedule.beta_bar(s)


@final
@dataclass(frozen=True, eq=False)
class MatchedNoise:
    """The noise of one trajectory, for the steps that land on s = 0, tau_1, ..., tau_(K-1), in this order."""

    schedule: Schedule
    trajectory: Trajectory
    eta: float
    power: Tensor  # p by frequency, (K, *D), float32; 0 at s = 0, positive elsewhere
    shift: Tensor  # added to the mean, by pixel, (K, *D), float32
    gain: Tensor  # g by frequency, in (0, 1], (K, *D), float32

    def __post_init__(self) -> None:
        for t in self.trajectory.times:
            self.schedule.check_times(t)
        ForwardProcess(self.schedule, self.eta)
        K = len(self.trajectory)
        for name, values in self.tensors().items():
            if values.dtype != torch.float32 or values.ndim < 2 or len(values) != K or values.shape != self.power.shape:
                raise ValueError(
                    f"the {name} of matched noise must be float32 of shape ({K}, *D), one for each step, got "
                    f"{values.dtype} {tuple(values.shape)}"
                )
            if not bool(values.isfinite().all()):
                raise ValueError(f"the {name} of matched noise holds NaN or infinity; measure it again")
        if bool((self.power[0] != 0).any()) or not bool((self.power[1:] > 0).all()):
            raise ValueError("the power of matched noise must be 0 at the step to time 0 and positive at all others")
        if not bool(((self.gain > 0) & (self.gain <= 1)).all()):
            raise ValueError("the gain of matched noise must be above 0 and at most 1; measure it again")

    def check_shape(self, shape: Sequence[int]) -> None:
        if tuple(shape) != self.shape:
            raise ValueError(
                f"the images have shape {tuple(shape)}, but the matched noise is for images of shape {self.shape}"
            )

    def identity(self) -> str:
        return digest_tensors(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """The measured tensors by name."""
        return {"power": self.power, "shift": self.shift, "gain": self.gain}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape D of one image."""
        return tuple(self.power.shape[1:])

    @cached_property
    def _places(self) -> dict[float, int]:
        return {s: place for place, s in enumerate((0, *self.trajectory.times[:-1]))}

    def step(self, current: Prediction, s: float, previous: Prediction | None = None) -> Gaussian:
        """The Gaussian over x_s, given the prediction at x_t and, except in the first step, the previous one at x_u."""
        if s not in self._places:
            raise ValueError(f"time {s} is no end of a step of this trajectory; steps end at {[*self._places]}")
        place = self._places[s]
        mean = mean_of_step(ForwardProcess(self.schedule, self.eta), current, s, previous)
        if s > 0:
            mean = Basis().inverse(self.gain[place].to(mean) * Basis().transform(mean))
        power = self.power[place].to(mean.device)
        return Gaussian(mean + self.shift[place].to(mean), Spectral(power[None]))


@torch.no_grad()
def match_noise(
    network: Network,
    schedule: Schedule,
    trajectory: Trajectory,
    data: DataMoments,
    *,
    eta: float = 1.0,
    samples: int = 512,
    seed: int = 0,
    rings: int | None = RINGS,
    floor: float = FLOOR,
    shrink: bool = False,
    condition: Mapping[str, Tensor] | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> MatchedNoise:
    """Measure shift and power of all steps on a batch of start noises, in samples * (K - 1) network evaluations.

    condition: further inputs of the network by name, with one entry per start noise.
    rings: the number of rings of frequencies per axis that share a ratio. None keeps each frequency apart.
    shrink: also scale down frequencies with too much power.
    """
    samples, batch_size = check_whole("samples", samples, LEAST), check_whole("batch_size", batch_size, 1)
    _check(rings, floor, trajectory)
    shape, forward = tuple(data.mean.shape), ForwardProcess(schedule, eta)
    numbers = range(FIRST_IMAGE, FIRST_IMAGE + samples)
    predictor = Predictor(network, schedule, check_condition(condition, samples), batch_size)
    white = _standardised(batch_noise(seed, numbers, 0, shape))
    x = Basis().inverse(white).to(device) * schedule.unit_data_std(trajectory.times[-1])
    power, shift = torch.zeros(2, len(trajectory), *shape)
    gain = torch.ones_like(power)
    steps = list(enumerate(trajectory.descending(), start=1))[:-1]  # the last one shows its mean: nothing to match
    for number, (t, s) in track(steps, len(steps), "matched noise", "steps", show=progress):
        current, previous = predictor.at(x, t)
        mean = mean_of_step(forward, current, s, previous)
        place = len(trajectory) - number
        least = floor * schedule.beta_bar(s)
        power[place], shift[place], gain[place] = _missing(mean, *data.at(schedule, s), rings, least, shrink)
        kept = Basis().transform(mean)
        white = _standardised(batch_noise(seed, numbers, number, shape), kept.cpu()).to(mean)
        inside = gain[place].to(mean) * kept + power[place].to(mean).sqrt() * white
        x = Basis().inverse(inside) + shift[place].to(mean)
    if not bool(x.isfinite().all()):
        raise ValueError("NaN or infinity on the way; check the network's input scale, weights and precision")
    return MatchedNoise(schedule, trajectory, eta, power, shift, gain)


def _missing(
    means: Tensor, mean: Tensor, power: Tensor, rings: int | None, least: Tensor, shrink: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """p, shift and g, (*D) each, for means of steps (B, *D) that should have a mean and a power by frequency."""
    found = Basis().transform(means.cpu().double())
    ratio = found.var(0) / power
    if rings is not None:
        ratio = ring_means(ratio, rings)
    gain = ((1 - least / power) / ratio).sqrt().clamp(max=1.0) if shrink else torch.ones_like(ratio)
    shift = Basis().inverse((mean - gain * found.mean(0))[None])[0]
    return torch.maximum(power * (1 - gain.square() * ratio), least).float(), shift.float(), gain.float()


def _standardised(noise: Tensor, beside: Tensor | None = None) -> Tensor:
    """Noise (B, *D) by frequency: mean 0 and variance 1 over the batch, no correlation with frequencies beside it."""
    white = Basis().transform(noise.double())
    white = white - white.mean(0)
    if beside is not None:
        other = beside.double() - beside.double().mean(0)
        spread = other.square().sum(0)
        white = white - other * ((white * other).sum(0) / spread).where(spread > 0, 0.0)
    return (white / white.std(0)).to(noise.dtype)


def ring_means(values: Tensor, rings: int) -> Tensor:
    """Means over rings of frequencies, (*D).

    A ring holds frequencies at a similar distance from 0. Each axis has length 1, and is cut into `rings` rings.
    """
    sides = values.shape if values.ndim == 1 else values.shape[1:]
    axes = torch.meshgrid(*[torch.arange(n, dtype=torch.float64) / n for n in sides], indexing="ij")
    ring = (torch.stack(axes).square().sum(0).sqrt() * rings).long().flatten()
    rows = values.reshape(-1, math.prod(sides))
    sums = rows.new_zeros(len(rows), int(ring.max()) + 1).index_add(1, ring, rows)
    return (sums / ring.bincount())[:, ring].reshape(values.shape)


def _check(rings: int | None, floor: float, trajectory: Trajectory) -> None:
    if rings is not None:
        check_whole("rings", rings, 1)
    if not 0 < check_number("floor", floor) < 1:
        raise ValueError(f"floor = {floor} is outside (0, 1); the default is {FLOOR}")
    if len(trajectory) < 2:
        raise ValueError("a trajectory of one step has no noise to match; take at least 2 steps")
