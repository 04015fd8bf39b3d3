"""What a solver returns, and the noise it draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from optcov.noise import batch_noise

StepNoise = Callable[[float, float], Tensor]


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
    numbers = range(len(start)) if indices is None else indices
    if len(numbers) != len(start):
        raise ValueError(f"there are {len(numbers)} indices for a batch of {len(start)} images; pass one per image")
    return numbers


@final
class NoiseSource:
    """Noise of step `number`, numbered from 1: that of (seed, image, number), or what the caller supplies."""

    def __init__(self, start: Tensor, seed: int, indices: Sequence[int] | None, supplied: StepNoise | None = None):
        self._like, self._seed, self._supplied = start, seed, supplied
        self._indices = check_start(start, indices)

    def draw(self, number: int, t: float, s: float) -> Tensor:
        """Noise of the step from t to s for the whole batch, (B, *D)."""
        if self._supplied is None:
            return self.draw_for(range(len(self._indices)), number)
        noise = self._supplied(t, s)
        if noise.shape != self._like.shape:
            raise ValueError(f"the supplied noise has shape {tuple(noise.shape)}, but x has {tuple(self._like.shape)}")
        return noise

    def draw_for(self, rows: Sequence[int], number: int) -> Tensor:
        """Noise for some rows of the batch, (len(rows), *D)."""
        images = [self._indices[row] for row in rows]
        return batch_noise(self._seed, images, number, self._like.shape[1:], self._like.dtype).to(self._like.device)
