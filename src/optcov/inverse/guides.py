"""How a reverse step takes a measurement into account: by the posterior's covariance, or as earlier methods do.

`ByPosterior` is the five lines of a reverse step with the posterior conditioned on the measurement:

    prediction = network(x_t, t, **condition)
    posterior  = covariance.posterior(prediction)       Gaussian over x_0 given x_t
    x_0        = a draw of the posterior given y        see optcov.inverse.conditioning
    step       = bridge(t, s).apply(x_0, x_t)           q(x_s | x_t, x_0)
    x_s        = step.sample(noise)

If the prior is Gaussian and v its full covariance, x_s is distributed exactly as given x_t and y, for any number of
steps. The others are baselines: DPS (Chung et al. 2023), PiGDM (Song et al. 2023), DiffPIR (Zhu et al. 2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from optcov.covariances import Covariance
from optcov.gaussian import CovarianceShape, Gaussian, Isotropic, per_sample, sum_pixels
from optcov.inverse.conditioning import StoppingRule, System
from optcov.inverse.operators import Operator
from optcov.noise import NoiseSource
from optcov.prediction import Prediction
from optcov.reverse import ReverseProcess

WAYS = ("proximal", "guidance")


@final
class UnitPrior(Covariance):
    """PiGDM's guess: v = beta_bar / (alpha_bar + beta_bar), exact for data that is a unit Gaussian."""

    structure = "isotropic"

    def __init__(self) -> None:
        self.name = "isotropic"  # type: ignore[misc]  # of the object: it is a guess, no covariance of the registry

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Isotropic(prediction.factor("velocity"))


@final
@dataclass(frozen=True)
class Draws:
    """The standard normal noise of one step; each part depends on (seed, sample, step) alone."""

    images: NoiseSource
    measurements: NoiseSource
    number: int  # of the step, from 1

    def clean(self) -> Tensor:
        """For x_0 given x_t, (B, *D)."""
        return self.images.drawn(3 * self.number - 2)

    def measured(self) -> Tensor:
        """For the measurement, (B, *M)."""
        return self.measurements.drawn(3 * self.number - 1)

    def bridge(self) -> Tensor:
        """For x_s given x_t and x_0, (B, *D)."""
        return self.images.drawn(3 * self.number)


class Guide(ABC):
    """One reverse step towards a measurement."""

    passes: int = 0  # back through the network, after each evaluation
    strength: float = 0.0  # the number that a baseline is tuned by, if there is one

    def __init__(
        self,
        process: ReverseProcess,
        operator: Operator,
        noise_std: float,
        stopping: StoppingRule,
        strength: float | None = None,
    ):
        self.process, self.operator, self.noise_std, self.stopping = process, operator, noise_std, stopping
        if strength is not None:
            self.strength = strength
        self.unsolved = 0  # systems that conjugate gradients did not solve to the tolerance
        self.solved = 0

    @abstractmethod
    def step(self, x_t: Tensor, y: Tensor, t: float, s: float, draws: Draws, condition: Mapping[str, Tensor]) -> Tensor:
        """x_s given x_t (B, *D) and y (B, *M)."""

    def _system(self, covariance: CovarianceShape, like: Tensor) -> System:
        return System(self.operator, covariance, self.noise_std, like, self.stopping)

    def _count(self, system: System, solves: int, batch: int) -> None:
        self.unsolved, self.solved = self.unsolved + system.unsolved, self.solved + solves * batch

    def _carried(self, x_0: Tensor, x_t: Tensor, t: float, s: float, draws: Draws) -> Tensor:
        """A draw of q(x_s | x_t, x_0)."""
        point = Gaussian(x_0, Isotropic(torch.zeros((), dtype=torch.float64)))
        step = self.process.forward.bridge(t, s).apply(point, x_t)
        return step.sample(draws.bridge()) if s > 0 else step.mean


@final
class ByPosterior(Guide):
    """Conditions the posterior on the measurement, with any covariance that has one.

    way: "proximal" multiplies by v. "guidance" takes the mean by gradients through the network instead: by Tweedie's
    formula the Jacobian G = (beta_bar / sqrt(alpha_bar)) d x0_hat / d x_t is the covariance of a perfect network, and
    m + G A^T z with (A G A^T + noise_std^2 I) z = y - A m needs no more than products with it, each a pass back. One
    product is one step of conjugate gradients, preconditioned by v: along z = S^-1 (y - A m), as far as G allows. What
    it leaves of the system is solved with v. If v is G, that is exact. Further steps with G made samples of a trained
    network worse: its Jacobian is no covariance.
    """

    def __init__(
        self,
        process: ReverseProcess,
        operator: Operator,
        noise_std: float,
        stopping: StoppingRule,
        way: str = "proximal",
    ):
        super().__init__(process, operator, noise_std, stopping)
        self.way, self.passes = way, int(way == "guidance")

    def step(self, x_t: Tensor, y: Tensor, t: float, s: float, draws: Draws, condition: Mapping[str, Tensor]) -> Tensor:
        if self.way == "guidance":
            x_0 = self._by_gradient(x_t, y, t, draws, condition)
        else:
            posterior = self.process.posterior_from(self.process.predict(x_t, t, **condition))
            system = self._system(posterior.covariance, posterior.mean)
            x_0 = system.conditioned_draw(posterior, y, draws.clean(), draws.measured())
            self._count(system, 1, len(x_t))
        return self._carried(x_0.to(x_t.dtype), x_t, t, s, draws)

    def _by_gradient(self, x_t: Tensor, y: Tensor, t: float, draws: Draws, condition: Mapping[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            at = x_t.detach().requires_grad_()
            prediction = self.process.predict(at, t, **condition)
            clean = prediction.clean
        posterior = self.process.posterior_from(prediction.without_graph())
        mean, covariance = posterior.mean, posterior.covariance
        system = self._system(covariance, mean)
        residual = y - self.operator.apply(mean)
        z = system.solve(residual)
        (gradient,) = torch.autograd.grad(clean, at, self.operator.adjoint(z).to(clean.dtype))
        signal, spread = self.process.forward.levels(t)
        # without signal x0_hat does not depend on x_t
        scale = (spread.square() / signal).where(signal > 0, 0.0)
        move = per_sample(scale, gradient) * gradient
        product = self.operator.apply(move) + self.noise_std**2 * z
        length = _length(z, residual, product)
        mean = mean + per_sample(length, move) * move
        left = residual - per_sample(length, product) * product  # 0 if v is G; the rest by v, without another pass
        self._count(system, 2, len(x_t))
        wanted = self.operator.apply(mean) + left
        return system.conditioned_draw(Gaussian(mean, covariance), wanted, draws.clean(), draws.measured())


@final
class DPS(Guide):
    """DDPM's own step, then a step down the gradient of |y - A x0_hat|, of a length that one tunes."""

    strength = 1.0
    passes = 1

    def step(self, x_t: Tensor, y: Tensor, t: float, s: float, draws: Draws, condition: Mapping[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            at = x_t.detach().requires_grad_()
            clean = self.process.predict(at, t, **condition).clean
        left = y - self.operator.apply(clean.detach())
        length = sum_pixels(left.square()).sqrt().clamp(min=torch.finfo(left.dtype).tiny)
        pull = -self.operator.adjoint(left / per_sample(length, left))  # the gradient of |left| by x0_hat
        (gradient,) = torch.autograd.grad(clean, at, pull.to(clean.dtype))
        x_s = self._carried(self.process.bounds.clip(clean.detach()), x_t, t, s, draws)
        guided: Tensor = x_s - self.strength * gradient
        return guided


@final
class PiGDM(Guide):
    """DDIM's step with eta = 1, plus sqrt(alpha_bar_t) times the gradient that the guess of one number gives."""

    passes = 1

    def step(self, x_t: Tensor, y: Tensor, t: float, s: float, draws: Draws, condition: Mapping[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            at = x_t.detach().requires_grad_()
            prediction = self.process.predict(at, t, **condition)
            clean = prediction.clean
        guess = prediction.factor("velocity")
        system = self._system(Isotropic(guess), clean.detach())
        mean = self.process.bounds.clip(clean.detach())
        pull = self.operator.adjoint(system.solve(y - self.operator.apply(mean)))
        (gradient,) = torch.autograd.grad(clean, at, pull.to(clean.dtype))
        self._count(system, 1, len(x_t))
        signal, _ = self.process.forward.levels(t)
        guided: Tensor = self._carried(mean, x_t, t, s, draws) + float(guess * signal) * gradient
        return guided


@final
class DiffPIR(Guide):
    """x0_hat is replaced by the proximal point with v = beta_bar / (alpha_bar strength); part of the noise is kept."""

    strength = 10.0
    NEW_NOISE: ClassVar[float] = 0.3  # the paper's zeta: the share of new noise in x_s
    MOST_VARIANCE: ClassVar[float] = 1e6  # where x_t has no signal

    def step(self, x_t: Tensor, y: Tensor, t: float, s: float, draws: Draws, condition: Mapping[str, Tensor]) -> Tensor:
        prediction = self.process.predict(x_t, t, **condition)
        mean = self.process.bounds.clip(prediction.clean)
        variance = (prediction.factor("noise") / self.strength).clamp(max=self.MOST_VARIANCE)
        system = self._system(Isotropic(variance), mean)
        x_0 = self.process.bounds.clip(system.conditioned_mean(mean, y)).to(x_t.dtype)
        self._count(system, 1, len(x_t))
        if s == 0:
            return x_0
        signal, spread = (float(level) for level in self.process.forward.levels(t))
        signal_s, spread_s = (float(level) for level in self.process.forward.levels(s))
        implied = (x_t - signal * x_0) / spread
        mixed = (1 - self.NEW_NOISE) ** 0.5 * implied + self.NEW_NOISE**0.5 * draws.bridge()
        x_s: Tensor = signal_s * x_0 + spread_s * mixed
        return x_s


def _length(z: Tensor, residual: Tensor, product: Tensor) -> Tensor:
    """How far to go along z, (B,): to the least error of the linear system, and no farther than z says."""
    wanted, curvature = sum_pixels(z * residual), sum_pixels(z * product)
    return torch.where(curvature > wanted, wanted / curvature, 1.0)
