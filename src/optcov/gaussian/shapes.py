"""The shapes of a covariance matrix: isotropic, diagonal or full. Also helpers for numbers per sample.

Shapes that correlate pixels by a basis of frequencies are in `correlated`.

A shape is anything that fits the `CovarianceShape` protocol. The rest of the package uses only these few operations, so
a new shape, such as a low-rank one, needs no changes elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final

import torch
from torch import Tensor

MOST_DENSE = 4096  # pixels of a matrix over all pairs of them


def per_sample(coefficient: Tensor, like: Tensor) -> Tensor:
    """Shape a coefficient, () or (B,), so that it multiplies `like` (B, *D) sample by sample."""
    if coefficient.ndim == 0:  # 0-dim: keeps the dtype of `like`, and needs no transfer to its device
        return coefficient
    if coefficient.shape != (like.shape[0],):
        raise ValueError(
            f"a per-sample coefficient has shape {tuple(coefficient.shape)}, but the batch has {like.shape[0]} "
            f"samples; pass one number, or one number per sample"
        )
    dtype = torch.promote_types(like.dtype, torch.float32)  # a coefficient never loses digits to half precision
    return coefficient.to(like.device, dtype).reshape(-1, *[1] * (like.ndim - 1))


def weighted_sum(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """a x + b y for x and y (B, *D) and coefficients () or (B,), with one pass less over memory than written out."""
    scaled = (per_sample(a, x) if a.ndim else a) * x
    return torch.addcmul(scaled, per_sample(b, y), y) if b.ndim else torch.add(scaled, y, alpha=float(b))


def sum_pixels(x: Tensor) -> Tensor:
    """Sum over everything but the batch: (B, *D) -> (B,)."""
    return x.flatten(1).sum(1)


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares per sample, float64: (B, *D) -> (B,)."""
    return x.detach().double().square().flatten(1).mean(1)


def check_dense(like: Tensor) -> int:
    """The number of pixels d of `like` (B, *D); a ValueError if a (d, d) matrix would be too large."""
    d = like[0].numel()
    if d > MOST_DENSE:
        raise ValueError(f"a matrix over {d:,} x {d:,} pixels is not made; at most {MOST_DENSE:,} pixels are dense")
    return d


def require_nonnegative(values: Tensor, name: str) -> None:
    """Refuse negative variances. NaN passes: the sampling loop finds it, and names the step."""
    if bool((values < 0).any()):
        raise ValueError(f"{name} has negative entries, so that nothing can be drawn; clamp them at 0 first")


def square_root(values: Tensor) -> Tensor:
    """Square roots whose gradient at 0 is 0. A pixel without variance then adds nothing; infinity would make NaN."""
    if not values.requires_grad:
        return values.sqrt()
    return values.where(values != 0, 1).sqrt().where(values != 0, 0)


class CovarianceShape(Protocol):
    """The operations of a covariance that a Gaussian over tensors (B, *D) needs."""

    def affine(self, factor: Tensor, variance: Tensor) -> CovarianceShape:
        """Multiply by a factor and add variance * I; both are () or (B,), and not negative."""
        ...

    def clamped(self, upper: float | None) -> tuple[CovarianceShape, ClampCounts]:
        """Bring every variance into [0, upper], and count the changed ones."""
        ...

    def floored(self, least: float, like: Tensor) -> CovarianceShape:
        """Raise variances to at least this value, so that there is a density."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """Multiply x (B, *D) by the covariance."""
        ...

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        """Multiply noise (B, *D) by a square root of the covariance."""
        ...

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """Compute x^T covariance^-1 x per sample, (B,)."""
        ...

    def log_det(self, like: Tensor) -> Tensor:
        """Log-determinant per sample, (B,), for a mean with the shape of `like` (B, *D)."""
        ...

    def diagonal(self, like: Tensor) -> Tensor:
        """Variances, broadcastable to `like` (B, *D)."""
        ...

    def inverse_diagonal(self, like: Tensor) -> Tensor:
        """The diagonal of the inverse, broadcastable to `like` (B, *D). Its sum is the trace of the inverse."""
        ...

    def dense(self, like: Tensor) -> Tensor:
        """The matrix over flattened pixels, (B, d, d), for small d."""
        ...


@dataclass(frozen=True)
class ClampCounts:
    """How many variances were moved into their bounds.

    The counts are tensors, so that counting never waits for a device.
    """

    below: Tensor | int  # () variances that were negative
    above: Tensor | int  # () variances that exceeded the data's largest possible one
    total: int  # variances looked at

    def __add__(self, other: ClampCounts) -> ClampCounts:
        return ClampCounts(self.below + other.below, self.above + other.above, self.total + other.total)


class Elementwise(ABC):
    """The common part of the two shapes without correlations."""

    variance: Tensor
    nonnegative: bool  # known by how it was made: to look at the values would make a device wait

    @abstractmethod
    def diagonal(self, like: Tensor) -> Tensor:
        """Variances, broadcastable to `like` (B, *D)."""

    def apply(self, x: Tensor) -> Tensor:
        return self.diagonal(x) * x

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        if not self.nonnegative:
            require_nonnegative(self.variance, "variance")
        return square_root(self.diagonal(noise)) * noise

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        return sum_pixels(x.square() / self.diagonal(x))

    def log_det(self, like: Tensor) -> Tensor:
        return sum_pixels(self.diagonal(like).log().expand_as(like))

    def floored(self, least: float, like: Tensor) -> Diagonal:
        return Diagonal(self.diagonal(like).clamp(min=least).expand_as(like), least >= 0)

    def inverse_diagonal(self, like: Tensor) -> Tensor:
        return self.diagonal(like).reciprocal()

    def dense(self, like: Tensor) -> Tensor:
        check_dense(like)
        return torch.diag_embed(self.diagonal(like).expand_as(like).flatten(1))


@final
@dataclass(frozen=True)
class Isotropic(Elementwise):
    """variance * I, with one variance for all samples, (), or one per sample, (B,)."""

    variance: Tensor
    nonnegative: bool = False

    def __post_init__(self) -> None:
        if self.variance.ndim > 1:
            raise ValueError(
                f"an isotropic variance is one number, or one per sample; got shape {tuple(self.variance.shape)}; "
                f"use Diagonal for a variance per pixel"
            )

    def affine(self, factor: Tensor, variance: Tensor) -> Isotropic:
        return Isotropic(variance + factor * self.variance, self.nonnegative)

    def clamped(self, upper: float | None) -> tuple[Isotropic, ClampCounts]:
        inside, counts = Diagonal(self.variance).clamped(upper)
        return Isotropic(inside.variance, inside.nonnegative), counts

    def diagonal(self, like: Tensor) -> Tensor:
        """The variance, () or (B, 1, ..., 1)."""
        return per_sample(self.variance, like).to(like.device)


@final
@dataclass(frozen=True)
class Diagonal(Elementwise):
    """diag(variance), with one variance per pixel, (B, *D)."""

    variance: Tensor
    nonnegative: bool = False

    def affine(self, factor: Tensor, variance: Tensor) -> Diagonal:
        if factor.ndim or variance.ndim:
            factor, variance = per_sample(factor, self.variance), per_sample(variance, self.variance)
        return Diagonal(variance + factor * self.variance, self.nonnegative)

    def clamped(self, upper: float | None) -> tuple[Diagonal, ClampCounts]:
        above = 0 if upper is None else torch.count_nonzero(self.variance > upper)
        counts = ClampCounts(torch.count_nonzero(self.variance < 0), above, self.variance.numel())
        return Diagonal(self.variance.clamp(0.0, upper), nonnegative=True), counts

    def diagonal(self, like: Tensor) -> Tensor:
        return self.variance


@final
@dataclass(frozen=True)
class Full:
    """A symmetric matrix per sample over the flattened pixels, for low-dimensional data.

    It works with eigenvalues. An estimated matrix need not be positive definite; SN's often is not. When drawing,
    negative eigenvalues count as zero.
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

    def affine(self, factor: Tensor, variance: Tensor) -> Full:
        identity = torch.eye(self.matrix.shape[-1], dtype=self.matrix.dtype, device=self.matrix.device)
        return Full(per_sample(factor, self.matrix) * self.matrix + per_sample(variance, self.matrix) * identity)

    def clamped(self, upper: float | None) -> tuple[Full, ClampCounts]:
        """Raise every eigenvalue to at least 0, and lower every variance on the diagonal to at most upper.

        The bound of a data range holds for single pixels, not for eigenvalues. Rows and columns are scaled together,
        which keeps the matrix positive semi-definite.
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

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix @ x.flatten(1).unsqueeze(-1)).reshape(x.shape)

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        """Multiply by the symmetric square root; negative eigenvalues count as zero."""
        values, vectors = self._eigen
        rotated = vectors.mT @ noise.flatten(1).unsqueeze(-1)
        drawn = vectors @ (values.clamp(min=0.0).sqrt().unsqueeze(-1) * rotated)
        return drawn.reshape(noise.shape)

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        values, vectors = self._eigen
        rotated = (vectors.mT @ x.flatten(1).unsqueeze(-1)).squeeze(-1)
        return (rotated.square() / values).sum(-1)

    def log_det(self, like: Tensor) -> Tensor:
        return self._eigen[0].log().sum(-1)

    def diagonal(self, like: Tensor) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(-1, *like.shape[1:])

    def floored(self, least: float, like: Tensor) -> Full:
        values, vectors = self._eigen
        return Full((vectors * values.clamp(min=least).unsqueeze(-2)) @ vectors.mT)

    def inverse_diagonal(self, like: Tensor) -> Tensor:
        values, vectors = self._eigen
        return (vectors.square() / values.unsqueeze(-2)).sum(-1).reshape(-1, *like.shape[1:])

    def dense(self, like: Tensor) -> Tensor:
        return self.matrix
