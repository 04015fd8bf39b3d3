"""Bridge 2M and Matched 2M: the mean of a second-order multistep solver, with noise of the bridge or measured noise.

With x_t = a x_0 + b eps, lam = log(a / b), the step from t to s after one from u to t (u > t > s):

    D    = x0_hat_t + w (x0_hat_t - x0_hat_u),   w = (lam_s - lam_t) / (2 (lam_t - lam_u))
    x_s ~ N(B^T diag(g_s) B (gamma D + kappa x_t) + shift_s,  B^T diag(p_s) B)

gamma and kappa are those of the bridge from t to s (optcov.forward) for an eta in [0, 1], and B is an orthonormal
cosine transform. The first step and the one to time 0 take D = x0_hat_t. The levels enter by gamma, kappa and lam
alone, so that variance-preserving schedules, EDM and flow matching are one formula. With g = 1 and no shift it is a
known solver twice: eta = 0 and p = 0 is DPM-Solver++ 2M, eta = 1 and p = lambda^2 is SDE-DPM-Solver++ 2M.

Bridge 2M is g = 1, no shift and p = lambda^2 with eta = 0.3. It needs no measurement. For Matched 2M, g, shift and p
are measured once per trajectory (optcov.solvers.matching) so that the mean of x_s and its power in every
frequency are those of the forward process. Given x_t, x_u and what the network says of both, x_s is Gaussian, so the
step has an exact density, in O(d log d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess
from optcov.gaussian import Gaussian, weighted_sum
from optcov.gaussian.basis import Basis
from optcov.gaussian.correlated import Spectral
from optcov.prediction import Network, Prediction, check_condition
from optcov.reverse import Step
from optcov.schedule import Schedule, check_whole
from optcov.solvers.result import SolverResult, noise_source
from optcov.trajectory import Trajectory
from optcov.watch import FiniteWatch, not_finite

ETA = 0.3  # docs/few-steps.md compares it and the next with others
FIRST_SIGMA = 0.05  # noise-to-signal ratio where the last step starts


def few_step_times(schedule: Schedule, steps: int) -> Trajectory:
    """Karras times whose last step starts at a noise-to-signal ratio of 0.05."""
    return Trajectory.karras(schedule, check_whole("steps", steps, 2), first_sigma=FIRST_SIGMA)


@final
@dataclass(frozen=True, eq=False)
class MatchedNoise:
    """What one trajectory needs, for the steps that land on s = 0, tau_1, ..., tau_(K-1), in this order."""

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

    def tensors(self) -> dict[str, Tensor]:
        """What was measured, by name."""
        return {"power": self.power, "shift": self.shift, "gain": self.gain}

    @property
    def shape(self) -> tuple[int, ...]:
        """D, the shape of one image."""
        return tuple(self.power.shape[1:])

    @cached_property
    def _places(self) -> dict[float, int]:
        return {s: place for place, s in enumerate((0, *self.trajectory.times[:-1]))}

    def step(self, current: Prediction, s: float, previous: Prediction | None = None) -> Gaussian:
        """The Gaussian over x_s, given what the network said at x_t and, but for the first step, at x_u before."""
        if s not in self._places:
            raise ValueError(f"time {s} is no end of a step of this trajectory; steps end at {[*self._places]}")
        place = self._places[s]
        mean = mean_of_step(ForwardProcess(self.schedule, self.eta), current, s, previous)
        if s > 0:
            mean = Basis().inverse(self.gain[place].to(mean) * Basis().transform(mean))
        power = self.power[place].to(mean.device)
        return Gaussian(mean + self.shift[place].to(mean), Spectral(power[None]))


def bridge_noise(schedule: Schedule, trajectory: Trajectory, shape: Sequence[int], eta: float = ETA) -> MatchedNoise:
    """The bridge's own white noise for images of shape D: what Bridge 2M draws with. eta must be above 0."""
    if not 0 < eta <= 1:
        raise ValueError(f"eta = {eta} draws no noise or too much; pass a number above 0 and at most 1")
    forward, power = ForwardProcess(schedule, eta), torch.zeros(len(trajectory), *shape)
    for place, (t, s) in enumerate(reversed(list(trajectory.descending()))):
        power[place] = 0 if s == 0 else forward.bridge(t, s).variance
    return MatchedNoise(schedule, trajectory, eta, power, torch.zeros_like(power), torch.ones_like(power))


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
    """w of the module's formula, (), float64; 0 where no signal was left at u."""
    before, now, after = (schedule.log_snr(time) for time in (u, t, s))
    return (after - now) / (2 * (now - before))


@torch.no_grad()
def matched_2m(
    network: Network,
    noise: MatchedNoise,
    start: Tensor,
    seed: int = 0,
    *,
    indices: Sequence[int] | None = None,
    data_range: tuple[float, float] | None = None,
    condition: Mapping[str, Tensor] | None = None,
    callback: Callable[[Step], None] | None = None,
) -> SolverResult:
    """Sample from start (B, *D), noise at the last time of the trajectory; x0_hat is clipped at the end alone.

    The noise of a step of image i is that of (seed, i, number of the step), whatever the batch.
    """
    if tuple(start.shape[1:]) != noise.shape:
        raise ValueError(
            f"start has shape {tuple(start.shape)}, but the matched noise is for images of shape {noise.shape}"
        )
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
    """A network along a trajectory, which remembers what it said last."""

    def __init__(self, network: Network, schedule: Schedule, condition: Mapping[str, Tensor], batch_size: int = 2**30):
        self._network, self._schedule, self._condition = network, schedule, condition
        self._batch_size = batch_size
        self._last: Prediction | None = None

    def at(self, x_t: Tensor, t: float) -> tuple[Prediction, Prediction | None]:
        """What the network says of x_t (B, *D), and what it said before."""
        clean = torch.cat([prediction.clean for prediction in self._parts(x_t, t)])
        previous, levels = self._last, self._schedule.levels(t)
        self._last = Prediction(x_t, t, clean, "sample", *levels)
        return self._last, previous

    def _parts(self, x_t: Tensor, t: float) -> Iterator[Prediction]:
        for first in range(0, len(x_t), self._batch_size):
            rows = slice(first, first + self._batch_size)
            told = {name: value[rows] for name, value in self._condition.items()}
            yield Prediction.of(self._network(x_t[rows], t, **told), x_t[rows], t, *self._schedule.levels(t))
