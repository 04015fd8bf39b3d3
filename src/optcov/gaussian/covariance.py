"""The shapes a covariance has: isotropic, diagonal or full.

A covariance is anything that fits the `Covariance` protocol: a few small operations are all that the rest of the
package asks of it, so that a low-rank or transformed-basis shape can join without changes elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final

import torch
from torch import Tensor

from optcov.gaussian.batch import per_sample, sum_pixels


class Covariance(Protocol):
    """What a Gaussian over tensors of shape (B, *D) needs to know about its covariance."""

    def scaled(self, factor: Tensor) -> Covariance:
        """Multiply by a factor, () or (B,)."""
        ...

    def plus_isotropic(self, variance: Tensor) -> Covariance:
        """Add variance * I; variance is () or (B,)."""
        ...

    def clamped(self, upper: float | None) -> tuple[Covariance, ClampCounts]:
        """Bring every variance into [0, upper] and count what had to move."""
        ...

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        """Multiply noise (B, *D) by a square root of the covariance."""
        ...

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """Compute x^T covariance^-1 x per sample, (B,)."""
        ...

    def log_det(self, like: Tensor) -> Tensor:
        """Log-determinant per sample, (B,), for a mean shaped as `like` (B, *D)."""
        ...

    def diagonal(self, like: Tensor) -> Tensor:
        """Variances, broadcastable to `like` (B, *D)."""
        ...

    def dense(self, like: Tensor) -> Tensor:
        """The matrix over flattened pixels, (B, d, d)."""
        ...


@dataclass(frozen=True)
class ClampCounts:
    """How many variances were moved into their bounds; tensors, so that counting never waits for a device."""

    below: Tensor  # () variances that were negative
    above: Tensor  # () variances that exceeded the data's largest possible one
    total: int  # variances looked at


class Elementwise(ABC):
    """Shared by the two shapes without correlations."""

    @abstractmethod
    def diagonal(self, like: Tensor) -> Tensor:
        """Variances, broadcastable to `like` (B, *D)."""

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        """Multiply by the standard deviations."""
        return self.diagonal(noise).sqrt() * noise

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """Sum x^2 / variance per sample, (B,)."""
        return sum_pixels(x.square() / self.diagonal(x))

    def log_det(self, like: Tensor) -> Tensor:
        """Sum log variance per sample, (B,)."""
        return sum_pixels(self.diagonal(like).log().expand_as(like))

    def dense(self, like: Tensor) -> Tensor:
        """The diagonal matrix, (B, d, d)."""
        return torch.diag_embed(self.diagonal(like).expand_as(like).flatten(1))


@final
@dataclass(frozen=True)
class Isotropic(Elementwise):
    """variance * I, with one variance for all samples, (), or one per sample, (B,)."""

    variance: Tensor

    def __post_init__(self) -> None:
        if self.variance.ndim > 1:
            raise ValueError(
                f"an isotropic variance is one number, or one per sample; got shape {tuple(self.variance.shape)}; "
                f"use Diagonal for a variance per pixel"
            )

    def scaled(self, factor: Tensor) -> Isotropic:
        """Multiply by a factor, () or (B,)."""
        return Isotropic(factor * self.variance)

    def plus_isotropic(self, variance: Tensor) -> Isotropic:
        """Add a variance, () or (B,)."""
        return Isotropic(variance + self.variance)

    def clamped(self, upper: float | None) -> tuple[Isotropic, ClampCounts]:
        """Bring the variances into [0, upper] and count what had to move."""
        return Isotropic(self.variance.clamp(0.0, upper)), _count_outside(self.variance, upper)

    def diagonal(self, like: Tensor) -> Tensor:
        """The variance, () or (B, 1, ..., 1)."""
        return per_sample(self.variance, like).to(like.device)


@final
@dataclass(frozen=True)
class Diagonal(Elementwise):
    """diag(variance), with one variance per pixel, (B, *D)."""

    variance: Tensor

    def scaled(self, factor: Tensor) -> Diagonal:
        """Multiply by a factor, () or (B,)."""
        return Diagonal(per_sample(factor, self.variance) * self.variance)

    def plus_isotropic(self, variance: Tensor) -> Diagonal:
        """Add a variance, () or (B,)."""
        return Diagonal(per_sample(variance, self.variance) + self.variance)

    def clamped(self, upper: float | None) -> tuple[Diagonal, ClampCounts]:
        """Bring the variances into [0, upper] and count what had to move."""
        return Diagonal(self.variance.clamp(0.0, upper)), _count_outside(self.variance, upper)

    def diagonal(self, like: Tensor) -> Tensor:
        """The variances as they are."""
        return self.variance


def _count_outside(variance: Tensor, upper: float | None) -> ClampCounts:
    above = torch.zeros((), dtype=torch.long) if upper is None else torch.count_nonzero(variance > upper)
    return ClampCounts(below=torch.count_nonzero(variance < 0), above=above, total=variance.numel())


@final
@dataclass(frozen=True)
class Full:
    """A symmetric matrix per sample over the flattened pixels, for low-dimensional data.

    Works by its eigenvalues: an estimated matrix need not be positive definite (that of SN often is not), and
    negative eigenvalues count as zero when one draws from it.
    """

    matrix: Tensor  # (B, d, d)

    def __post_init__(self) -> None:
        if self.matrix.ndim != 3 or self.matrix.shape[1] != self.matrix.shape[2]:
            raise ValueError(f"a full covariance has shape (B, d, d), got {tuple(self.matrix.shape)}")

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        symmetric = (self.matrix + self.matrix.mT) / 2
        bad = ~symmetric.isfinite().flatten(1).all(1)
        values, vectors = torch.linalg.eigh(symmetric.masked_fill(bad[:, None, None], 0.0))
        return values.masked_fill(bad[:, None], torch.nan), vectors  # a bad sample stays bad, its neighbours do not

    def scaled(self, factor: Tensor) -> Full:
        """Multiply by a factor, () or (B,)."""
        return Full(per_sample(factor, self.matrix) * self.matrix)

    def plus_isotropic(self, variance: Tensor) -> Full:
        """Add variance * I, () or (B,)."""
        identity = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        return Full(self.matrix + per_sample(variance, self.matrix) * identity)

    def clamped(self, upper: float | None) -> tuple[Full, ClampCounts]:
        """Bring every eigenvalue up to 0 and every variance on the diagonal down to upper.

        The bound of a data range holds for single pixels, not for eigenvalues; rows and columns are scaled
        together, which keeps the matrix positive semi-definite.
        """
        values, vectors = self._eigen
        rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
        negative = values < -rounding
        matrix = (vectors * values.clamp(min=0.0).unsqueeze(-2)) @ vectors.mT if bool(negative.any()) else self.matrix
        above = torch.zeros((), dtype=torch.long)
        if upper is not None:
            pixels = matrix.diagonal(dim1=-2, dim2=-1)
            above = (pixels > upper).sum()
            shrink = (upper / pixels.clamp(min=upper)).sqrt()
            matrix = shrink.unsqueeze(-1) * matrix * shrink.unsqueeze(-2)
        return Full(matrix), ClampCounts(below=negative.sum(), above=above, total=values.numel())

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        """Multiply by the symmetric square root, negative eigenvalues taken as zero."""
        values, vectors = self._eigen
        rotated = vectors.mT @ noise.flatten(1).unsqueeze(-1)
        drawn = vectors @ (values.clamp(min=0.0).sqrt().unsqueeze(-1) * rotated)
        return drawn.reshape(noise.shape)

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """Compute x^T matrix^-1 x per sample, (B,)."""
        values, vectors = self._eigen
        rotated = (vectors.mT @ x.flatten(1).unsqueeze(-1)).squeeze(-1)
        return (rotated.square() / values).sum(-1)

    def log_det(self, like: Tensor) -> Tensor:
        """Sum of the logarithms of the eigenvalues, (B,)."""
        return self._eigen[0].log().sum(-1)

    def diagonal(self, like: Tensor) -> Tensor:
        """The diagonal in the shape of `like`, (B, *D)."""
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(-1, *like.shape[1:])

    def dense(self, like: Tensor) -> Tensor:
        """The matrix itself, (B, d, d)."""
        return self.matrix
