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


@final
class NoiseSource:
    """Noise of step `number`, numbered from 1: that of (seed, image, number), or what the caller supplies."""

    def __init__(self, start: Tensor, seed: int, indices: Sequence[int] | None, supplied: StepNoise | None = None):
        if start.ndim < 2 or not start.is_floating_point():
            raise ValueError(
                f"start must be a floating-point tensor (B, *D), got {start.dtype} of shape {tuple(start.shape)}"
            )
        self._like, self._seed, self._supplied = start, seed, supplied
        self._indices = range(len(start)) if indices is None else indices
        if len(self._indices) != len(start):
            raise ValueError(
                f"there are {len(self._indices)} indices for a batch of {len(start)} images; pass one per image"
            )

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
