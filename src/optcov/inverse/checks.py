"""What an operator is checked for: shapes, linearity, its adjoint, and whether a measurement is in its range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from optcov.gaussian import per_sample, sum_pixels
from optcov.schedule import is_whole

if TYPE_CHECKING:
    from optcov.inverse.operators import Operator

Map = Callable[[Tensor], Tensor]

RANGE_TOLERANCE = 1e-3  # of a measurement without noise, relative to its size


def check_adjoint(operator: Operator, dtype: torch.dtype = torch.float32) -> None:
    """Refuse an operator that is not linear, or whose adjoint is not its adjoint, by random x, x' and y.

    The check: <A x, y> = <x, A^T y> and A (2 x + x') = 2 A x + A x', in batches of one and of three.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *operator.shape, generator=generator).to(dtype)
    y = torch.randn(3, *operator.measurement_shape, generator=generator).to(dtype)
    seen, back = called("apply", operator.apply, x), called("adjoint", operator.adjoint, y)
    for name, found, wanted in (("apply", seen, y), ("adjoint", back, x)):
        if found.shape != wanted.shape:
            told = tuple(found.shape)
            raise ValueError(f"{name} returned {told} for a batch of 3; it must return {tuple(wanted.shape)}")
        if not bool(found.isfinite().all()):
            raise ValueError(f"{name} gives NaN or infinity for finite numbers; pass a map with finite entries")
    if not bool(seen.any()):
        raise ValueError("apply gives nothing but 0; pass a map that measures something")
    swapped = x.flip(0)
    parts = [called("apply", operator.apply, part) for part in (swapped, *x[:, None])]
    combined = operator.apply(2 * x + swapped) - 2 * seen - parts[0]
    size = math.sqrt(float(seen.double().square().sum())) + 1e-30
    alone = torch.cat(parts[1:]) - seen  # each image by itself
    if math.sqrt(float(combined.double().square().sum() + alone.double().square().sum())) > 1e-3 * size:
        raise ValueError("apply is not linear: A (2 x + x') differs from 2 A x + A x'; pass a linear map of each image")
    left, right = sum_pixels((seen * y).double()), sum_pixels((x * back).double())
    scale = (sum_pixels(seen.double().square()) * sum_pixels(y.double().square())).sqrt() + 1e-30
    worst = float(((left - right).abs() / scale).max())
    if not worst < 1e-3:
        raise ValueError(
            f"adjoint is not the adjoint of apply: <A x, y> and <x, A^T y> differ by {worst:.2g} of their size; "
            f"pass the transposed map"
        )


def called(name: str, function: Map, batch: Tensor) -> Tensor:
    """What a function of the user's returns; what it raises is a ValueError that says with which batch."""
    given = batch.clone()
    try:
        found = function(given)
    except Exception as error:  # a function of the user's may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{name} failed on a batch {tuple(batch.shape)} of {batch.dtype}: {reason}; it must take any batch "
            f"(B, *{tuple(batch.shape[1:])})"
        ) from error
    if not torch.equal(given, batch):
        raise ValueError(f"{name} changes the batch that it is given; let it return a new tensor instead")
    if not is_plain(found) or not found.is_floating_point() or found.device != batch.device:
        raise ValueError(
            f"{name} returned {kind_of(found)} for {kind_of(batch)}; it must return a dense tensor of real numbers, on "
            f"the device of its input"
        )
    return found


def distance_to_range(
    operator: Operator, y: Tensor, iterations: int = 200, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The relative distance of measurements to all A x, (B,), by least squares: A^T A x = A^T y."""
    y = y.to(dtype)
    tiny = torch.finfo(dtype).tiny
    left = y.clone()
    gradient = operator.adjoint(left)
    direction, power = gradient.clone(), sum_pixels(gradient.square())
    for _ in range(iterations):
        seen = operator.apply(direction)
        length = power / sum_pixels(seen.square()).clamp(min=tiny)
        left = left - per_sample(length, left) * seen
        gradient = operator.adjoint(left)
        power, before = sum_pixels(gradient.square()), power
        direction = gradient + per_sample(power / before.clamp(min=tiny), gradient) * direction
        if bool((relative_size(left, y) < RANGE_TOLERANCE / 10).all()):
            break
    return relative_size(left, y)


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether this is a dense tensor with values."""
    return isinstance(value, Tensor) and not (
        value.is_nested or value.is_meta or value.is_quantized or _is_sparse(value)
    )


def kind_of(value: object) -> str:
    """What a value is, for a refusal."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if is_plain(value):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    kinds = (("nested", value.is_nested), ("quantized", value.is_quantized), ("sparse", _is_sparse(value)))
    return next((f"a {kind} tensor" for kind, so in kinds if so), "a tensor without values")


def _is_sparse(value: Tensor) -> bool:
    return value.layout != torch.strided


def check_shape(shape: Sequence[int], name: str = "shape") -> tuple[int, ...]:
    """The shape (*D) of one image, in whole numbers."""
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not all(is_whole(n) and n > 0 for n in shape):
        raise ValueError(f"{name} = {shape!r} is not the shape of an image; pass one such as (3, 32, 32)")
    if not shape:
        raise ValueError(f"{name} = () has no axis; pass one such as (3, 32, 32)")
    return tuple(int(n) for n in shape)


def check_image(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape (C, H, W) of an image."""
    known = check_shape(shape)
    if len(known) != 3:
        raise ValueError(f"shape = {known} is not (C, H, W), which this operator needs")
    return known


def relative_size(part: Tensor, whole: Tensor) -> Tensor:
    """Root of the sum of squares of a part over that of the whole, (B,), on the CPU."""
    sizes = sum_pixels(part.double().square()) / sum_pixels(whole.double().square()).clamp(min=1e-300)
    return sizes.sqrt().cpu()
