"""Blur: a convolution of every channel with one kernel, general or separable, with periodic or zero borders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from optcov.inverse.checks import Map, check_image, is_plain, kind_of
from optcov.inverse.operators import Operator
from optcov.schedule import check_number, is_whole

BORDERS = ("periodic", "zero")
LARGEST = 1e6  # of a kernel: beyond, squares leave the range of float32
MARGIN = 1e-5  # of the mean eigenvalue: a preconditioner must not divide by the zeros of a spectrum


@final
class Blur(Operator):
    """y = kernel * x, centred on the kernel's middle pixel.

    kernel: (h, w) with odd sides; or (h,) for a separable kernel, which is applied down and across.
    border: "periodic" continues the image with its opposite side, "zero" puts zeros outside.
    """

    name = "blur"

    def __init__(self, shape: Sequence[int], kernel: Tensor, border: str = "periodic"):
        self.shape = self.measurement_shape = check_image(shape)
        if border not in BORDERS:
            raise ValueError(f"border = {border!r} is not one of {', '.join(BORDERS)}")
        if not is_plain(kernel) or kernel.is_complex() or kernel.ndim not in (1, 2):
            raise ValueError(
                f"a blur kernel is a dense tensor of real numbers (h, w) or (h,), got {kind_of(kernel)}; convert it"
            )
        if not all(n % 2 for n in kernel.shape):
            raise ValueError(f"a blur kernel has odd sides, got {tuple(kernel.shape)}; pad it by zeros")
        kernel = kernel.detach().double().cpu()
        if not bool((kernel.abs() <= LARGEST).all()) or not bool(kernel.any()):
            raise ValueError(f"a blur kernel holds numbers up to {LARGEST:g} that are not all 0; scale it to the sum 1")
        self.border, self.separable = border, kernel.ndim == 1
        self.kernel = torch.outer(kernel, kernel) if self.separable else kernel
        if any(n > m for n, m in zip(self.kernel.shape, self.shape[-2:], strict=True)):
            raise ValueError(
                f"a kernel of {tuple(self.kernel.shape)} is larger than images of {self.shape[-2:]}; cut it"
            )
        self._parts = [kernel[:, None], kernel[None, :]] if self.separable else [kernel]
        self._spectrum = self._transfer()  # exact for periodic borders, nearly so for zero ones

    @staticmethod
    def gaussian(shape: Sequence[int], std: float, size: int | None = None, border: str = "periodic") -> Blur:
        """A Gaussian kernel; std is in pixels.

        size: the side of the kernel. By default it is cut at three standard deviations.
        """
        std = check_number("std", std)
        if not 0 < std < math.inf:
            raise ValueError(f"std = {std} is not a positive number of pixels; pass one such as 1.5")
        sides = check_image(shape)[-2:]
        largest = min(sides) - 1 + min(sides) % 2
        side = min(2 * round(min(3 * std, largest)) + 1, largest) if size is None else size
        if not is_whole(side) or side < 1 or side % 2 == 0 or side > largest:
            raise ValueError(f"size = {size!r} is not an odd number of pixels; pass one from 1 to {largest}")
        places = torch.arange(side, dtype=torch.float64) - side // 2
        weights = torch.exp(-((places / std) ** 2) / 2)
        return Blur(shape, weights / weights.sum(), border)

    def apply(self, x: Tensor) -> Tensor:
        if self.border == "periodic":
            return self._filtered(x, self._spectrum)
        for part in self._parts:
            x = self._convolved(x, part.flip(0, 1))
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        if self.border == "periodic":
            return self._filtered(y, self._spectrum.conj())
        for part in self._parts:  # odd kernels and zero borders: the transposed map is the mirrored kernel
            y = self._convolved(y, part)
        return y

    def preconditioner(self, variance: Tensor, noise_variance: Tensor) -> Map:
        level, noise = (x.double().cpu().reshape(-1, 1, 1, 1) for x in (variance.flatten(1).mean(1), noise_variance))
        power = level * self._spectrum.abs().square() + noise
        inverse = 1 / (power + MARGIN * power.mean((-2, -1), keepdim=True)).clamp(min=1e-30)
        return lambda y: self._filtered(y, inverse)

    def _transfer(self) -> Tensor:
        """The kernel's Fourier transform, (H, W // 2 + 1), complex128."""
        rows, columns = self.shape[-2:]
        padded = torch.zeros(rows, columns, dtype=torch.float64)
        height, width = self.kernel.shape
        padded[:height, :width] = self.kernel
        spectrum: Tensor = torch.fft.rfft2(padded.roll((-(height // 2), -(width // 2)), (0, 1)))
        return spectrum

    def _filtered(self, x: Tensor, spectrum: Tensor) -> Tensor:
        kind = torch.complex128 if x.dtype == torch.float64 else torch.complex64
        weights = spectrum.to(x.device, kind if spectrum.is_complex() else x.dtype)
        filtered: Tensor = torch.fft.irfft2(torch.fft.rfft2(x) * weights, s=x.shape[-2:])
        return filtered

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        weight = kernel.to(x)[None, None].expand(x.shape[1], 1, *kernel.shape)
        padding = (kernel.shape[0] // 2, kernel.shape[1] // 2)
        return torch.nn.functional.conv2d(x, weight, padding=padding, groups=x.shape[1])
