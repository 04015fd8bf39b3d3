"""The Gaussian over x_0 given x_t, conditioned on a measurement y = A x_0 + noise.

With N(m, v) given x_t, S = A v A^T + noise_std^2 I and z = S^-1 (y - A m):

    mean        m + v A^T z
    covariance  v - v A^T S^-1 A v

Both at once by one solve (Matheron's rule): draw e ~ N(0, v) and n ~ N(0, noise_std^2 I); then
m + e + v A^T S^-1 (y - A (m + e) - n) is a draw of the conditioned Gaussian, for any A and any shape of v.
S is diagonal for masks and averages of independent pixels; elsewhere conjugate gradients solve it. There the variance
of the noise counts as at least a few units in the last digit of the variance of A x_0: a thousandth of its standard
deviation in float32. Without any noise the S of a blur is singular to all digits, and the solution would be rounding
errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from optcov.gaussian import CovarianceShape, Gaussian, per_sample, sum_pixels
from optcov.gaussian.correlated import Correlated, Spectral
from optcov.gaussian.shapes import Elementwise
from optcov.inverse.checks import Map
from optcov.inverse.operators import Operator
from optcov.schedule import check_number, check_whole

SMALLEST = 1e-30  # a variance below is 0: what has no variance and no noise cannot be moved
LEAST_NOISE = 8  # units in the last digit of the mean variance of A x_0, where S is solved by iteration


@final
@dataclass(frozen=True)
class StoppingRule:
    """When conjugate gradients stop: at a residual relative to the right-hand side, or after so many iterations."""

    tolerance: float = 1e-4
    iterations: int = 500

    def __post_init__(self) -> None:
        if not 0 < check_number("tolerance", self.tolerance) < 1:
            raise ValueError(f"tolerance = {self.tolerance} is not between 0 and 1; the default is 1e-4")
        check_whole("iterations", self.iterations, 1)


@final
class System:
    """S = A v A^T + noise_std^2 I for a batch, and how to solve with it; `unsolved` counts what did not converge."""

    def __init__(
        self, operator: Operator, covariance: CovarianceShape, noise_std: float, like: Tensor, stopping: StoppingRule
    ):
        self.operator, self.covariance, self.stopping = operator, covariance, stopping
        self.noise_variance = noise_std**2
        self.unsolved = 0
        self._like = like
        self._diagonal: Tensor | None = None
        if isinstance(covariance, Elementwise):
            self._diagonal = operator.diagonal(covariance.diagonal(like).expand_as(like))

    @cached_property
    def _shift(self) -> Tensor:
        """What stands beside A v A^T on the diagonal, (B,): the noise, or a little where that is too little.

        The mean of the diagonal of A v A^T is estimated by one vector of signs, the same for all.
        """
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (1, *self.operator.measurement_shape), generator=generator).to(self._like) * 2 - 1
        back = self.operator.adjoint(signs.expand(len(self._like), *signs.shape[1:]))
        mean = sum_pixels(back * self.covariance.apply(back)) / signs.numel()
        return (LEAST_NOISE * torch.finfo(mean.dtype).eps * mean).clamp(min=self.noise_variance)

    def gain(self, z: Tensor) -> Tensor:
        """v A^T z, (B, *M) -> (B, *D)."""
        return self.covariance.apply(self.operator.adjoint(z))

    def apply(self, z: Tensor) -> Tensor:
        """S z."""
        return self.operator.apply(self.gain(z)) + per_sample(self._shift, z) * z

    def solve(self, right: Tensor) -> Tensor:
        """S^-1 right; where S is singular, the solution without a part in its null space."""
        if self._diagonal is not None:
            whole = self._diagonal + self.noise_variance
            return torch.where(whole > SMALLEST, right / whole.clamp(min=SMALLEST), 0.0)
        solution, converged = conjugate_gradients(self.apply, right, self._preconditioner(), self.stopping)
        self.unsolved += int((~converged).sum())
        return solution

    def _preconditioner(self) -> Map:
        """A rough inverse of S: among frequencies, or of its diagonal, or what the operator itself offers."""
        variance = self.covariance.diagonal(self._like).expand_as(self._like)
        diagonal = self.operator.diagonal(variance)
        if diagonal is None:
            return self.operator.preconditioner(variance, self._shift)
        if isinstance(self.covariance, Spectral | Correlated):
            return self._among_frequencies(self.covariance)
        whole = diagonal + per_sample(self._shift, diagonal)
        inverse = torch.where(whole > SMALLEST, 1 / whole.clamp(min=SMALLEST), 0.0)
        return lambda y: inverse * y

    def _among_frequencies(self, covariance: Spectral | Correlated) -> Map:
        """A (v + n I)^-1 A^T / p^2 for an A whose rows are orthogonal, of a squared length p; n = noise variance / p.

        It is the inverse of S if A sees everything. On images of CIFAR-10 it takes 25 iterations where the diagonal of
        S takes 400.
        """
        seen = self.operator.seen.to(self._like)
        lengths = self.operator.diagonal(torch.ones_like(self._like[:1]))
        assert lengths is not None
        power = lengths.sum() / seen.sum()
        whole = covariance.affine(torch.ones((), dtype=torch.float64), self._shift / power)

        def precondition(y: Tensor) -> Tensor:
            inside = self.operator.apply(whole.inverse_apply(self.operator.adjoint(y))) / power**2
            return inside + (1 - seen) * y / per_sample(self._shift, y)

        return precondition

    def conditioned_mean(self, mean: Tensor, y: Tensor) -> Tensor:
        """m + v A^T S^-1 (y - A m), (B, *D)."""
        return mean + self.gain(self.solve(y - self.operator.apply(mean)))

    def conditioned_draw(self, posterior: Gaussian, y: Tensor, noise: Tensor, measurement_noise: Tensor) -> Tensor:
        """A draw of the conditioned Gaussian by standard normal noise, (B, *D) and (B, *M)."""
        return self.conditioned_mean(posterior.sample(noise), y - self.noise_variance**0.5 * measurement_noise)


def conjugate_gradients(apply: Map, right: Tensor, precondition: Map, stopping: StoppingRule) -> tuple[Tensor, Tensor]:
    """Solve a symmetric positive system for a batch: the solutions (B, *M), and which converged, (B,) booleans.

    Each sample stops on its own, so that the others of its batch do not change it.
    """
    x, residual, tiny = torch.zeros_like(right), right.clone(), torch.finfo(right.dtype).tiny
    goal = stopping.tolerance**2 * sum_pixels(right.square())
    scaled = precondition(residual)
    direction, power = scaled.clone(), sum_pixels(residual * scaled)
    active = sum_pixels(residual.square()) > goal
    for _ in range(stopping.iterations):
        if not bool(active.any()):
            break
        product = apply(direction)
        curvature = sum_pixels(direction * product)
        active = active & (curvature > 0)  # a direction without curvature is in the null space: nothing to gain
        length = torch.where(active, power / curvature.clamp(min=tiny), 0.0)
        x, residual = x + per_sample(length, x) * direction, residual - per_sample(length, x) * product
        active = active & (sum_pixels(residual.square()) > goal)
        scaled = precondition(residual)
        power, before = sum_pixels(residual * scaled), power
        direction = scaled + per_sample(power / before.clamp(min=tiny), x) * direction
    return x, sum_pixels(residual.square()) <= goal
