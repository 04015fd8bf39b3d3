"""The numbers that a gradient training consists of, with the learning rate and EMA decay they imply per step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


class TrainingError(ValueError):
    """A training cannot start or go on; the message says why, and what is safe on disk."""


MOST = 10**9  # steps, images or samples of a training or a fit


@final
@dataclass(frozen=True)
class TrainingConfig:
    """Hyper-parameters of one training; a step's randomness depends on (seed, step) alone.

    keep: how many of the latest checkpoints stay. keep_every: those at multiples of this step stay too (0: none).
    """

    steps: int
    batch_size: int = 128
    learning_rate: float = 1e-4
    warmup: int = 0  # steps of linear warm-up
    decay: str = "cosine"  # "cosine" to zero at the last step, or "constant"
    weight_decay: float = 0.0
    ema: float = 0.9999
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 0
    checkpoint_every: int = 1000
    keep: int = 2
    keep_every: int = 0
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "checkpoint_every", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.steps > MOST:
            raise TrainingError(f"steps = {self.steps} would never end; use {MOST} or fewer")
        for name in ("warmup", "weight_decay", "keep_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise TrainingError(f"{name} = {getattr(self, name)} must be 0 or more")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise TrainingError(f"{name} = {getattr(self, name)} must be a positive number")
        if not 0 <= self.ema < 1:
            raise TrainingError(f"ema = {self.ema} is outside [0, 1); 0.9999 averages over about 10,000 steps")
        if self.decay not in ("cosine", "constant"):
            raise TrainingError(f'unknown decay {self.decay!r}; choose "cosine" or "constant"')

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of step 1..steps: linear warm-up, then constant or a half cosine down to zero."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.decay == "constant":
            return self.learning_rate
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2

    def ema_decay_at(self, step: int) -> float:
        """Decay of the moving average after step n: min(ema, (1 + n) / (10 + n)), so that its start is forgotten."""
        return min(self.ema, (1 + step) / (10 + step))
