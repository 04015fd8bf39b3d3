"""Linear operators with their adjoints: what a measurement sees of an image.

y = A x + noise. An operator knows the shapes of both sides, and applies A and A^T to batches. It also knows whether A
diag(v) A^T is diagonal (masks, averages), gives an estimate of it otherwise, and tells how far a measurement is from
any A x. `blur @ mask` is the composition: first the mask, then the blur.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from optcov.gaussian import per_sample
from optcov.inverse.checks import (
    Map,
    called,
    check_adjoint,
    check_image,
    check_shape,
    distance_to_range,
    is_plain,
    kind_of,
    relative_size,
)
from optcov.schedule import check_number, check_whole, is_whole

PART_MARGIN = 1e-3  # of the mean variance: added to the noise in the preconditioner of a composition


class Operator(ABC):
    """A linear map of images (B, *shape) to measurements (B, *measurement_shape)."""

    name: str = "linear map"
    shape: tuple[int, ...]
    measurement_shape: tuple[int, ...]

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """A x, (B, *shape) -> (B, *measurement_shape)."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """A^T y, (B, *measurement_shape) -> (B, *shape)."""

    def diagonal(self, variance: Tensor) -> Tensor | None:
        """The diagonal of A diag(variance) A^T, (B, *measurement_shape); None if the matrix is not diagonal."""
        return None

    def preconditioner(self, variance: Tensor, noise_variance: Tensor) -> Map:
        """A rough inverse of A diag(variance) A^T + noise_variance I up to a factor, symmetric and positive.

        noise_variance: (B,).
        """
        return lambda y: y

    def outside_range(self, y: Tensor) -> Tensor:
        """How far each measurement is from the nearest A x, relative to its size, (B,)."""
        return distance_to_range(self, y)

    @property
    def seen(self) -> Tensor:
        """1 for each entry of the measurement that depends on the image, 0 for each that is always 0."""
        return torch.ones(self.measurement_shape)

    def __matmul__(self, first: Operator) -> Composition:
        return Composition(self, first)

    def __repr__(self) -> str:
        return f"{self.name}, {self.shape} -> {self.measurement_shape}"


@final
class Identity(Operator):
    """Denoising: the whole image is seen."""

    name = "identity"

    def __init__(self, shape: Sequence[int]):
        self.shape = self.measurement_shape = check_shape(shape)

    def apply(self, x: Tensor) -> Tensor:
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        return y

    def diagonal(self, variance: Tensor) -> Tensor:
        return variance

    def outside_range(self, y: Tensor) -> Tensor:
        return torch.zeros(len(y), dtype=torch.float64)


@final
class Mask(Operator):
    """Inpainting: pixels are seen where the mask is 1; elsewhere the measurement is 0.

    mask: zeros and ones, or booleans.
    shape: the shape of an image, to which the mask is broadcast. The default is the mask's own shape.
    """

    name = "mask"

    def __init__(self, mask: Tensor, shape: Sequence[int] | None = None):
        if not is_plain(mask):
            raise ValueError(f"mask is {kind_of(mask)}, not a dense torch tensor; convert it, by torch.as_tensor say")
        self.shape = self.measurement_shape = check_shape(mask.shape if shape is None else shape)
        if mask.is_complex():
            raise ValueError("a mask holds zeros (hidden) and ones (seen) only; compare with a threshold first")
        try:
            full = mask.detach().double().expand(self.shape).clone()
        except RuntimeError as error:
            raise ValueError(
                f"a mask of shape {tuple(mask.shape)} does not fit images of shape {self.shape}; "
                f"pass one of the image's own shape, or (H, W)"
            ) from error
        if not bool(((full == 0) | (full == 1)).all()):
            raise ValueError("a mask holds zeros (hidden) and ones (seen) only; compare with a threshold first")
        if not bool(full.any()):
            raise ValueError("the mask hides every pixel, so that nothing is measured; let it show some")
        self.mask = full

    @staticmethod
    def box(shape: Sequence[int], top: int, left: int, height: int, width: int) -> Mask:
        """Hide a box of pixels, and see all others."""
        shape = check_image(shape)
        rows, columns = shape[-2:]
        given = {"top": (top, 0), "left": (left, 0), "height": (height, 1), "width": (width, 1)}
        top, left, height, width = (check_whole(name, *value) for name, value in given.items())
        if top + height > rows or left + width > columns:
            raise ValueError(
                f"a box of {height} x {width} pixels at row {top}, column {left} does not lie inside {rows} x "
                f"{columns}; choose a smaller one"
            )
        mask = torch.ones(shape)
        mask[..., top : top + height, left : left + width] = 0
        return Mask(mask)

    @staticmethod
    def random(shape: Sequence[int], hidden: float, seed: int = 0) -> Mask:
        """Hide this share of the pixels at random, the same in every channel."""
        shape, seed = check_shape(shape), check_whole("seed", seed, 0)
        if not 0 <= check_number("hidden", hidden) < 1:
            raise ValueError(f"hidden = {hidden} is not a share of pixels; pass a number from 0 to below 1")
        generator = torch.Generator().manual_seed(seed % 2**63)
        drawn = torch.rand(shape[-2:] if len(shape) == 3 else shape, generator=generator)
        return Mask(drawn >= min(hidden, float(drawn.max())), shape)

    def apply(self, x: Tensor) -> Tensor:
        return self.mask.to(x) * x

    def adjoint(self, y: Tensor) -> Tensor:
        return self.apply(y)

    def diagonal(self, variance: Tensor) -> Tensor:
        return self.mask.to(variance) * variance

    def outside_range(self, y: Tensor) -> Tensor:
        return relative_size((1 - self.mask.to(y)) * y, y)

    @property
    def seen(self) -> Tensor:
        return self.mask


@final
class Average(Operator):
    """Super-resolution: each pixel of the measurement is the mean of a square of factor x factor pixels."""

    name = "average"

    def __init__(self, shape: Sequence[int], factor: int):
        self.shape = check_image(shape)
        if not is_whole(factor) or factor < 1 or self.shape[-1] % factor or self.shape[-2] % factor:
            raise ValueError(
                f"factor = {factor!r} does not divide images of {self.shape[-2]} x {self.shape[-1]} pixels; "
                f"choose a whole number that does"
            )
        self.factor = factor = int(factor)
        self.measurement_shape = (*self.shape[:-2], self.shape[-2] // factor, self.shape[-1] // factor)

    def apply(self, x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x, self.factor)

    def adjoint(self, y: Tensor) -> Tensor:
        return y.repeat_interleave(self.factor, -2).repeat_interleave(self.factor, -1) / self.factor**2

    def diagonal(self, variance: Tensor) -> Tensor:
        return self.apply(variance.expand(len(variance), *self.shape)) / self.factor**2

    def outside_range(self, y: Tensor) -> Tensor:
        return torch.zeros(len(y), dtype=torch.float64)


@final
class Linear(Operator):
    """Any linear map, given as `apply` and `adjoint` on batches. Both are checked when it is made (`check_adjoint`)."""

    def __init__(self, apply: Map, adjoint: Map, shape: Sequence[int], name: str = "linear map"):
        if not callable(apply) or not callable(adjoint):
            raise ValueError("apply and adjoint must be functions of a batch; pass A x and A^T y")
        if not isinstance(name, str):
            raise ValueError(f"name = {name!r:.80} is not a text; pass one such as 'linear map'")
        self.shape, self.name = check_shape(shape), name
        self._apply, self._adjoint = apply, adjoint
        x = torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(0))
        seen = called("apply", apply, x)
        if seen.ndim < 2 or len(seen) != 2:
            found = tuple(seen.shape)
            raise ValueError(f"apply returned shape {found} for a batch of 2 images; it must return a tensor (2, *M)")
        self.measurement_shape = tuple(seen.shape[1:])
        check_adjoint(self)

    def apply(self, x: Tensor) -> Tensor:
        return self._apply(x)

    def adjoint(self, y: Tensor) -> Tensor:
        return self._adjoint(y)

    def outside_range(self, y: Tensor) -> Tensor:
        return distance_to_range(self, y, dtype=torch.float32)  # the precision that it was checked in


@final
class Composition(Operator):
    """`last @ first`: applies `first`, then `last`."""

    def __init__(self, last: Operator, first: Operator):
        if not isinstance(first, Operator) or not isinstance(last, Operator):
            raise ValueError("only operators can be composed; make one by Linear(apply, adjoint, shape)")
        if last.shape != first.measurement_shape:
            raise ValueError(
                f"{last.name} takes images of shape {last.shape}, but {first.name} gives {first.measurement_shape}; "
                f"make both for matching shapes"
            )
        self.last, self.first = last, first
        self.shape, self.measurement_shape = first.shape, last.measurement_shape
        self.name = f"{last.name} of {first.name}"

    def apply(self, x: Tensor) -> Tensor:
        return self.last.apply(self.first.apply(x))

    def adjoint(self, y: Tensor) -> Tensor:
        return self.first.adjoint(self.last.adjoint(y))

    def diagonal(self, variance: Tensor) -> Tensor | None:
        inner = self.first.diagonal(variance)
        return None if inner is None else self.last.diagonal(inner)

    @cached_property
    def seen(self) -> Tensor:
        """1 for each entry of the measurement that a random image makes other than 0."""
        image = torch.randn(1, *self.shape, generator=torch.Generator().manual_seed(0))
        return (self.apply(image)[0] != 0).to(image.dtype)

    def preconditioner(self, variance: Tensor, noise_variance: Tensor) -> Map:
        inner = self.first.diagonal(variance)
        if inner is not None:
            return self.last.preconditioner(inner, noise_variance)
        # inverts as if the last operator saw everything, with more noise, so that errors grow less
        rough = torch.maximum(noise_variance, PART_MARGIN * variance.flatten(1).mean(1))
        whole = self.first.preconditioner(variance, rough)
        unseen, least = (1 - self.seen).to(variance), noise_variance.clamp(min=1e-30)
        return lambda y: self.last.apply(whole(self.last.adjoint(y))) + unseen * y / per_sample(least, y)
