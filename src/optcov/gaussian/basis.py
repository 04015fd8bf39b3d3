"""An orthonormal basis of frequencies: a cosine transform over the axes of an image, and a mixture of its channels.

    y = B x:    y[c, k, l] = sum over channels, rows, columns of M[c, a] D_H[k, i] D_W[l, j] x[a, i, j]
    D_n[k, i] = s_k cos(pi (2 i + 1) k / (2 n)),    s_0 = sqrt(1 / n), s_k = sqrt(2 / n)           (DCT-II)

Data (B, d) has one axis and no channels; data (B, C, *sides) has channels. Axes of up to 128 are transformed by small
matrix products, which costs O(d^1.5) for images but is faster there than the O(d log d) of the fast Fourier transform,
which longer axes take. Both work on any device and can be differentiated. No matrix over all pixels is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

LONGEST_MATRIX = 128  # of an axis that is transformed by a matrix product


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """Frequencies of data (B, *D); channels: an orthogonal (C, C) that mixes them first, None leaves them apart."""

    channels: Tensor | None = None

    def __post_init__(self) -> None:
        mixture = self.channels
        if mixture is None:
            return
        if mixture.ndim != 2 or mixture.shape[0] != mixture.shape[1] or not mixture.is_floating_point():
            raise ValueError(f"a mixture of channels is a matrix (C, C), got {mixture.dtype} {tuple(mixture.shape)}")
        exact = mixture.double()
        error = float(
            (exact @ exact.mT - torch.eye(len(mixture), dtype=torch.float64, device=exact.device)).abs().max()
        )
        if not error < 1e-5:
            raise ValueError(f"a mixture of channels must be orthogonal, but M M^T is off the identity by {error:.2g}")

    def transform(self, x: Tensor) -> Tensor:
        """B x: powers per frequency are its squares, (B, *D)."""
        x = x if self.channels is None else _mixed(x, self.channels)
        for axis in _sides(x):
            x = _along(x, axis, "forward")
        return x

    def inverse(self, y: Tensor) -> Tensor:
        """B^T y, (B, *D)."""
        for axis in _sides(y):
            y = _along(y, axis, "inverse")
        return y if self.channels is None else _mixed(y, self.channels.mT)

    def pixel_variances(self, power: Tensor) -> Tensor:
        """The diagonal of B^T diag(power) B, (B, *D): by the squares of the basis, axis after axis."""
        for axis in _sides(power):
            power = _along(power, axis, "squares")
        return power if self.channels is None else _mixed(power, self.channels.mT.square())


PLAIN = Basis()  # channels apart


def cosine_matrix(n: int) -> Tensor:
    """D_n, (n, n), float64: row k is the frequency k."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * n) * (k * (2 * i + 1))) * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix


def _mixed(x: Tensor, matrix: Tensor) -> Tensor:
    if x.ndim < 3 or x.shape[1] != len(matrix):
        raise ValueError(f"a mixture of {len(matrix)} channels does not fit data of shape {tuple(x.shape)}")
    return torch.einsum("ca,ba...->bc...", matrix.to(x), x)


def _sides(x: Tensor) -> range:
    """The axes that are transformed: all of (B, d), all but the channels of others."""
    return range(1 if x.ndim == 2 else 2, x.ndim)


def _along(x: Tensor, axis: int, what: str) -> Tensor:
    n = x.shape[axis]
    if n <= LONGEST_MATRIX:
        matrix = _matrix(n, what, x.dtype, x.device)
        if axis == x.ndim - 1:
            return x @ matrix.mT
        if axis == x.ndim - 2:
            return matrix @ x
        return (x.movedim(axis, -1) @ matrix.mT).movedim(-1, axis)
    return _FAST[what](x.movedim(axis, -1)).movedim(-1, axis)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # cached: a matrix made in inference mode could not take part in later gradients
def _matrix(n: int, what: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    matrix = cosine_matrix(n)
    chosen = {"forward": matrix, "inverse": matrix.mT, "squares": matrix.square().mT}[what]
    return chosen.contiguous().to(device, dtype)


def _fast_forward(x: Tensor) -> Tensor:
    n = x.shape[-1]
    folded = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
    turned: Tensor = torch.fft.fft(folded) * _phases(n, -1, x)
    return turned.real * _scales(n, x)


def _fast_inverse(y: Tensor) -> Tensor:
    n = y.shape[-1]
    plain = y / _scales(n, y)
    mirrored = torch.cat([torch.zeros_like(plain[..., :1]), plain[..., 1:].flip(-1)], -1)
    folded = torch.fft.ifft(torch.complex(plain, -mirrored) * _phases(n, 1, y)).real
    even, odd = folded[..., : (n + 1) // 2], folded[..., (n + 1) // 2 :].flip(-1)
    x = torch.empty_like(folded)
    x[..., ::2], x[..., 1::2] = even, odd
    return x


def _fast_squares(power: Tensor) -> Tensor:
    """By cos^2 a = (1 + cos 2a) / 2: twice a frequency is a frequency again, or the mirror image of one."""
    n = power.shape[-1]
    double = torch.zeros_like(power)
    below, above = (n - 1) // 2, n // 2 + 1  # 2 k < n up to the first, 2 k > n from the second on
    double[..., 2 : 2 * below + 1 : 2] += power[..., 1 : below + 1]
    places = 2 * n - 2 * torch.arange(above, n, device=power.device)
    double = double.index_add(-1, places, -power[..., above:])
    cosines = _fast_inverse(double / _scales(n, power))
    return (power.sum(-1, keepdim=True) + cosines) / n


def _phases(n: int, sign: int, like: Tensor) -> Tensor:
    angle = torch.arange(n, dtype=like.dtype, device=like.device) * (sign * math.pi / (2 * n))
    return torch.polar(torch.ones_like(angle), angle)


def _scales(n: int, like: Tensor) -> Tensor:
    scales = like.new_full((n,), math.sqrt(2 / n))
    scales[0] = math.sqrt(1 / n)
    return scales


_FAST: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": _fast_forward,
    "inverse": _fast_inverse,
    "squares": _fast_squares,
}
