"""Multistep samplers: the mean of a second-order solver, plus noise.

With x_t = a x_0 + b eps, lam = log(a / b), consider the step from t to s, after a step from u to t (u > t > s):

    D    = x0_hat_t + w (x0_hat_t - x0_hat_u),   w = min(0.8, (lam_s - lam_t) / (2 (lam_t - lam_u)))
    x_s ~ N(gamma D + kappa x_t,  lambda^2 I)

gamma, kappa and lambda^2 are those of the bridge from t to s (optcov.forward) for an eta in [0, 1]. The first step and
the step to time 0 take D = x0_hat_t. The noise levels enter only by the bridge and lam. So one formula serves
variance-preserving schedules, EDM and flow matching.

While w is below its bound, two known solvers are special cases: eta = 0 is DPM-Solver++ 2M, eta = 1 is SDE-DPM-Solver++
2M. Bridge 2M is eta = 0.3. Matched 2M (optcov.solvers.matching) has the same mean and other noise. Given x_t, x_u and
the network's predictions at both, x_s is Gaussian. So each step has an exact density.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess
from optcov.gaussian import Gaussian, Isotropic, weighted_sum
from optcov.prediction import Network, Prediction, check_condition
from optcov.reverse import Step
from optcov.schedule import Schedule, check_number, check_whole, is_whole
from optcov.solvers.result import SolverResult, noise_source
from optcov.trajectory import Trajectory, sigma_of
from optcov.watch import FiniteWatch, not_finite

# docs/results-few-steps.md compares these with others
ETA = 0.3
FIRST_SIGMA = 0.05  # noise-to-signal ratio where the last step starts
LAST_SIGMAS, BY_SIDE = (40.0, 160.0), 0.28  # that where the first one starts: bounds, and its ratio to side times steps
MOST_EXTRAPOLATED = 0.8  # w of a step that is long beside the one before; Karras times stay below


def last_sigma(steps: int, shape: Sequence[int] | None = None) -> float:
    """The noise-to-signal ratio where the first of this many steps starts.

    shape: (*D) of the data; None for large images.

    Steps at larger ratios are wasted. But the start noise is white, while the mean brightness of an image of side n has
    a standard deviation of about 0.3 n in an orthonormal basis. A start at a small ratio lacks part of this brightness,
    and more steps do not correct that. So the ratio grows with the side and with the number of steps.
    """
    check_sides("shape", shape)
    low, high = LAST_SIGMAS
    positions = math.inf if shape is None else math.prod(shape[1:] if len(shape) > 1 else shape)
    return min(max(BY_SIDE * math.sqrt(positions) * steps, low), high)


def check_sides(name: str, shape: Any) -> None:
    """Refuse a value that is no shape (*D) of data; None is allowed."""
    sides = shape if isinstance(shape, Sequence) else ()
    if shape is not None and not (sides and all(is_whole(n) and n > 0 for n in sides)):
        raise ValueError(
            f"{name} = {shape!r:.80} is not a list of positive whole numbers; pass (C, H, W), or None for large images"
        )


def few_step_times(
    schedule: Schedule, steps: int, shape: Sequence[int] | None = None, first_sigma: float = FIRST_SIGMA
) -> Trajectory:
    """Karras times between the noise-to-signal ratios first_sigma and `last_sigma`, as far as the schedule has them.

    If a network is weak at low noise, a larger first_sigma may give better images (docs/few-steps.md).
    """
    if not 0 < check_number("first_sigma", first_sigma) < LAST_SIGMAS[0]:
        raise ValueError(
            f"first_sigma = {first_sigma} is no noise-to-signal ratio of a last step; pass a number above 0 and below "
            f"{LAST_SIGMAS[0]:g}, such as 0.15"
        )
    last = last_sigma(check_whole("steps", steps, 1), shape)
    if steps == 1:
        return Trajectory((schedule.final_time,))
    if schedule.discrete and steps > schedule.grid_size:
        raise ValueError(
            f"steps = {steps} is more than this schedule has times; take at most {schedule.grid_size}, one for each"
        )
    least, most = (sigma_of(schedule, t) for t in (schedule.first_time, schedule.last_time_with_signal))
    first = first_sigma if least < first_sigma < most / 2 else None  # else all that the schedule has
    return Trajectory.karras(schedule, steps, first_sigma=first, last_sigma=last if most > last else None)


class MultistepNoise(Protocol):
    """The noise of a multistep sampler along one trajectory."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def trajectory(self) -> Trajectory: ...

    def step(self, current: Prediction, s: float, previous: Prediction | None = None) -> Gaussian:
        """The Gaussian over x_s, given the prediction at x_t and, except in the first step, the previous one at x_u."""

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse images of a shape that the noise does not fit."""

    def identity(self) -> Any:
        """What determines an image besides schedule and trajectory, as a plain JSON value."""


@final
@dataclass(frozen=True)
class BridgeNoise:
    """The noise of Bridge 2M: the bridge's own white noise, for data of any shape."""

    schedule: Schedule
    trajectory: Trajectory
    eta: float = ETA

    def __post_init__(self) -> None:
        if not 0 < check_number("eta", self.eta) <= 1:
            raise ValueError(f"eta = {self.eta} draws no noise or too much; pass a number above 0 and at most 1")
        for t in self.trajectory.times:
            self.schedule.check_times(t)

    def step(self, current: Prediction, s: float, previous: Prediction | None = None) -> Gaussian:
        forward = ForwardProcess(self.schedule, self.eta)
        variance = forward.bridge(float(current.t), s).variance
        return Gaussian(mean_of_step(forward, current, s, previous), Isotropic(variance if s > 0 else 0 * variance))

    def check_shape(self, shape: Sequence[int]) -> None:
        pass

    def identity(self) -> dict[str, float]:
        return {"eta": self.eta}


def mean_of_step(forward: ForwardProcess, current: Prediction, s: float, previous: Prediction | None) -> Tensor:
    """gamma D + kappa x_t, (B, *D)."""
    t = float(current.t)
    bridge = forward.bridge(t, s)
    clean = current.clean
    if previous is not None and s > 0:
        w = extrapolation(forward.schedule, float(previous.t), t, s)
        clean = weighted_sum(1 + w, clean, -w, previous.clean)
    return weighted_sum(bridge.clean_weight, clean, bridge.noisy_weight, current.x_t)


def extrapolation(schedule: Schedule, u: float, t: float, s: float) -> Tensor:
    """w of the module's formula, (), float64; 0 if no signal was left at u."""
    before, now, after = (schedule.log_snr(time) for time in (u, t, s))
    return ((after - now) / (2 * (now - before))).clamp(max=MOST_EXTRAPOLATED)


@torch.no_grad()
def multistep_sample(
    network: Network,
    noise: MultistepNoise,
    start: Tensor,
    seed: int = 0,
    *,
    indices: Sequence[int] | None = None,
    data_range: tuple[float, float] | None = None,
    condition: Mapping[str, Tensor] | None = None,
    callback: Callable[[Step], None] | None = None,
) -> SolverResult:
    """Sample from start (B, *D), which is noise at the last time of the trajectory. x0_hat is clipped only at the end.

    The noise of a step of image i depends on (seed, i, number of the step), not on the batch.
    """
    noise.check_shape(start.shape[1:])
    source = noise_source(start, seed, indices)
    watch, x = FiniteWatch(start), start
    predictions = Predictor(network, noise.schedule, check_condition(condition, len(start)))
    for number, (t, s) in enumerate(noise.trajectory.descending(), start=1):
        current, previous = predictions.at(x, t)
        gaussian = noise.step(current, s, previous)
        if s == 0:
            x_s = gaussian.mean if data_range is None else gaussian.mean.clamp(*data_range)
        else:
            x_s = gaussian.sample(source.draw(number, t, s))
        watch.note_bad(current.bad_samples() | not_finite(x_s), t)
        if callback is not None:
            callback(Step(t, s, x, gaussian, x_s))
        x = x_s
    watch.require_finite()
    return SolverResult(x, torch.full((len(x),), len(noise.trajectory)))


@final
class Predictor:
    """A network along a trajectory that remembers its last prediction."""

    def __init__(self, network: Network, schedule: Schedule, condition: Mapping[str, Tensor], batch_size: int = 2**30):
        self._network, self._schedule, self._condition = network, schedule, condition
        self._batch_size = batch_size
        self._last: Prediction | None = None

    def at(self, x_t: Tensor, t: float) -> tuple[Prediction, Prediction | None]:
        """The network's prediction at x_t (B, *D), and its previous prediction."""
        clean = torch.cat([prediction.clean for prediction in self._parts(x_t, t)])
        previous, levels = self._last, self._schedule.levels(t)
        self._last = Prediction(x_t, t, clean, "sample", *levels)
        return self._last, previous

    def _parts(self, x_t: Tensor, t: float) -> Iterator[Prediction]:
        for first in range(0, len(x_t), self._batch_size):
            rows = slice(first, first + self._batch_size)
            told = {name: value[rows] for name, value in self._condition.items()}
            yield Prediction.of(self._network(x_t[rows], t, **told), x_t[rows], t, *self._schedule.levels(t))
