"""What a solver starts from, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from optcov.noise import NoiseSource, StepNoise, image_numbers


@final
@dataclass(frozen=True)
class SolverResult:
    """Samples, and what they cost."""

    x_0: Tensor  # (B, *D)
    evaluations: Tensor  # network evaluations of each sample (NFE), (B,), int64, on the CPU


def check_start(start: Tensor, indices: Sequence[int] | None = None) -> Sequence[int]:
    """Refuse what is no batch of images to start from; return the number of each image."""
    if start.ndim < 2 or 0 in start.shape or not start.is_floating_point():
        raise ValueError(
            f"start must be a floating-point tensor (B, *D) that is not empty, got {start.dtype} of shape "
            f"{tuple(start.shape)}"
        )
    return image_numbers(indices, len(start))


def noise_source(
    start: Tensor, seed: int, indices: Sequence[int] | None, supplied: StepNoise | None = None
) -> NoiseSource:
    """The noise of the steps from start (B, *D), of its precision and on its device."""
    return NoiseSource(start.shape, seed, check_start(start, indices), supplied, start.dtype, start.device)
