"""Covariances that are diagonal among frequencies: alone, or between two diagonal matrices over the pixels.

    Spectral     B^T diag(power) B
    Correlated   S^1/2 B^T diag(spectrum) B S^1/2,  S diagonal

B is the orthonormal `Basis`. Draws, densities, log-determinants and the diagonals of both matrix and inverse take a few
transforms each, exactly. Nothing of the size of the matrix is made but by `dense`: for tests, and for the KL between
two such Gaussians.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from optcov.gaussian.basis import PLAIN, Basis
from optcov.gaussian.shapes import (
    ClampCounts,
    Diagonal,
    check_dense,
    per_sample,
    require_nonnegative,
    square_root,
    sum_pixels,
)


@final
@dataclass(frozen=True, eq=False)
class Spectral:
    """B^T diag(power) B: correlations that are the same all over the image."""

    power: Tensor  # variance of each frequency, (1, *D) or (B, *D)
    basis: Basis = PLAIN

    def __post_init__(self) -> None:
        _check_axes(self.power, "power")

    @property
    def over(self) -> tuple[int, ...]:
        """The shape that a mean must be broadcastable to."""
        return tuple(self.power.shape)

    def affine(self, factor: Tensor, variance: Tensor) -> Spectral:
        """Multiply by a factor and add variance * I, both () or (B,): exact, since I is diagonal in any basis."""
        power = _per_sample(factor, self.power) * self.power + _per_sample(variance, self.power)
        return Spectral(power, self.basis)

    def clamped(self, upper: float | None) -> tuple[Spectral, ClampCounts]:
        """Bring every power up to 0 and the mean variance of a pixel down to upper, by one factor for a sample.

        The bound of a data range holds for pixels: single frequencies may well exceed it.
        """
        below = torch.count_nonzero(self.power < 0)
        power = self.power.clamp(min=0.0)
        above: Tensor | int = 0
        if upper is not None:
            mean = power.flatten(1).mean(1)
            above = torch.count_nonzero(mean > upper) * math.prod(power.shape[1:])
            power = power * _per_sample(upper / mean.clamp(min=upper), power)
        return Spectral(power, self.basis), ClampCounts(below, above, power.numel())

    def floored(self, least: float, like: Tensor) -> Spectral:
        return Spectral(self.power.clamp(min=least), self.basis)

    def apply(self, x: Tensor) -> Tensor:
        return self.basis.inverse(self.power.to(x) * self.basis.transform(x))

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        return self.basis.inverse(_root(self.power.to(noise), "power") * self.basis.transform(noise))

    def inverse_apply(self, x: Tensor) -> Tensor:
        return self.basis.inverse(self.basis.transform(x) / self.power.to(x))

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        return sum_pixels(self.basis.transform(x).square() / self.power.to(x))

    def log_det(self, like: Tensor) -> Tensor:
        return sum_pixels(self.power.to(like).log()).expand(len(like))

    def diagonal(self, like: Tensor) -> Tensor:
        return self.basis.pixel_variances(self.power.to(like))

    def inverse_diagonal(self, like: Tensor) -> Tensor:
        return self.basis.pixel_variances(self.power.to(like).reciprocal())

    def dense(self, like: Tensor) -> Tensor:
        return _dense(self.power.to(like).expand_as(like), self.basis)


@final
@dataclass(frozen=True, eq=False)
class Correlated:
    """V^1/2 C V^1/2: a variance for each pixel, and correlations C that follow from one spectrum.

    C = R^-1/2 B^T diag(spectrum) B R^-1/2, where R = diag(B^T diag(spectrum) B) makes its diagonal 1. So the variances
    of single pixels are those of Diagonal(variance), whatever the spectrum.
    """

    variance: Tensor  # V, (B, *D)
    spectrum: Tensor  # positive, (1, *D) or (B, *D)
    basis: Basis = PLAIN

    def __post_init__(self) -> None:
        _check_axes(self.variance, "variance")
        _check_axes(self.spectrum, "spectrum")
        shapes = tuple(self.variance.shape), tuple(self.spectrum.shape)
        if len(shapes[0]) != len(shapes[1]) or any(n != m and 1 not in (n, m) for n, m in zip(*shapes, strict=False)):
            raise ValueError(
                f"spectrum has shape {shapes[1]}, but variance has {shapes[0]}; pass (1, *D) or (B, *D) of the same *D"
            )

    @property
    def over(self) -> tuple[int, ...]:
        """The shape that a mean must be broadcastable to."""
        pairs = zip(self.variance.shape, self.spectrum.shape, strict=True)
        return tuple(m if n == 1 else n for n, m in pairs)

    @cached_property
    def _scale(self) -> Tensor:
        """S = V / R, so that the matrix is S^1/2 B^T diag(spectrum) B S^1/2, (B, *D)."""
        return self.variance / self.basis.pixel_variances(self.spectrum.to(self.variance))

    def affine(self, factor: Tensor, variance: Tensor) -> Correlated:
        """Multiply by a factor, and add white noise of a variance, both () or (B,): in the fast form.

        V becomes variance + factor V, exactly. The spectrum, of mean 1, becomes a + (1 - a) spectrum, where a is the
        white share of V: the mean of variance / V over the pixels of a sample. That is the sum itself where the
        variance is 0 or the spectrum flat. Elsewhere the sum has no such form, and this Gaussian is drawn from and
        scored.
        """
        white = _per_sample(variance, self.variance)
        total = white + _per_sample(factor, self.variance) * self.variance
        share = (white / total).where(total > 0, 0.0).flatten(1).mean(1)
        spectrum = self.spectrum.to(total)
        spectrum = spectrum / _per_sample(spectrum.flatten(1).mean(1), spectrum)
        return Correlated(total, 1 + _per_sample(1 - share, total) * (spectrum - 1), self.basis)

    def clamped(self, upper: float | None) -> tuple[Correlated, ClampCounts]:
        """Bring the pixels' variances into [0, upper], as those of a diagonal covariance; correlations stay."""
        inside, counts = Diagonal(self.variance).clamped(upper)
        return Correlated(inside.variance, self.spectrum, self.basis), counts

    def floored(self, least: float, like: Tensor) -> Correlated:
        """Raise every pixel's variance to at least this; correlations stay."""
        return Correlated(self.variance.clamp(min=least), self.spectrum, self.basis)

    def apply(self, x: Tensor) -> Tensor:
        root = self._scale.to(x).sqrt()
        return root * self.basis.inverse(self.spectrum.to(x) * self.basis.transform(root * x))

    def sqrt_apply(self, noise: Tensor) -> Tensor:
        """Multiply by S^1/2 B^T diag(spectrum)^1/2 B: with a flat spectrum, by the standard deviations."""
        correlated = self.basis.inverse(_root(self.spectrum.to(noise), "spectrum") * self.basis.transform(noise))
        return _root(self._scale.to(noise), "variance") * correlated

    def inverse_apply(self, x: Tensor) -> Tensor:
        root = self._scale.to(x).sqrt()
        return self.basis.inverse(self.basis.transform(x / root) / self.spectrum.to(x)) / root

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        whitened = self.basis.transform(x / self._scale.to(x).sqrt())
        return sum_pixels(whitened.square() / self.spectrum.to(x))

    def log_det(self, like: Tensor) -> Tensor:
        return sum_pixels(self._scale.to(like).log()) + sum_pixels(self.spectrum.to(like).log())

    def diagonal(self, like: Tensor) -> Tensor:
        return self.variance.to(like)

    def inverse_diagonal(self, like: Tensor) -> Tensor:
        return self.basis.pixel_variances(self.spectrum.to(like).reciprocal()) / self._scale.to(like)

    def dense(self, like: Tensor) -> Tensor:
        root = self._scale.to(like).sqrt().expand_as(like).flatten(1)
        middle = _dense(self.spectrum.to(like).expand_as(like), self.basis)
        return root.unsqueeze(-1) * middle * root.unsqueeze(-2)


def _dense(power: Tensor, basis: Basis) -> Tensor:
    """B^T diag(power) B, (B, d, d)."""
    d = check_dense(power)
    identity = torch.eye(d, dtype=power.dtype, device=power.device).reshape(d, *power.shape[1:])
    frequencies = basis.transform(identity).flatten(1)  # (d, d): column f is the frequency f over the pixels
    return torch.einsum("if,bf,jf->bij", frequencies, power.flatten(1), frequencies)


def _per_sample(coefficient: Tensor, like: Tensor) -> Tensor:
    """A coefficient, () or (B,), for what has one entry for all samples, or one for each."""
    one_for_all = coefficient.ndim and len(like) == 1
    return per_sample(coefficient, like.expand(len(coefficient), *like.shape[1:]) if one_for_all else like)


def _root(values: Tensor, name: str) -> Tensor:
    """Square roots, to draw with."""
    require_nonnegative(values, name)
    return square_root(values)


def _check_axes(values: Tensor, name: str) -> None:
    if values.ndim < 2 or math.prod(values.shape[1:]) == 0:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; pass (1, *D) for all samples or (B, *D)")
