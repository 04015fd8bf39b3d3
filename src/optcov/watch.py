"""The watch that keeps NaN from leaving a long loop without making the loop wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class FiniteWatch:
    """Remembers on the device which samples of x (B, *D) went bad at which step; read once, at the end."""

    def __init__(self, x: Tensor):
        self._first_bad = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self._times: list[float] = []

    def note(self, x: Tensor, t: float) -> None:
        """Take note of the result (B, *D) of the step that started at time t."""
        self.note_bad(not_finite(x), t)

    def note_bad(self, bad: Tensor, t: float) -> None:
        """Take note of the samples (B,) that went bad in the step that started at time t."""
        self._times.append(t)
        self._first_bad = torch.where(bad & (self._first_bad == 0), len(self._times), self._first_bad)

    def require_finite(self) -> None:
        """Raise a ValueError that names step, time and samples, if there was a bad one."""
        first_bad = self._first_bad.cpu()
        samples = first_bad.nonzero().flatten().tolist()
        if samples:
            number = int(first_bad[samples].min())
            raise ValueError(bad_value_message(number, self._times[number - 1], samples))


def not_finite(x: Tensor) -> Tensor:
    """Mark the samples of x (B, *D) with a NaN or infinity: (B,) booleans, on the device of x."""
    # a float64 sum of float32 numbers is finite if and only if they all are; one pass instead of two
    return ~x.flatten(1).sum(1, dtype=torch.float64).isfinite()


def bad_value_message(number: int, t: float, samples: Sequence[int]) -> str:
    """Say where a solver met NaN or infinity."""
    return (
        f"NaN or infinity: first at step {number} (time {t}), in samples {list(samples[:10])}"
        f"{' and others' if len(samples) > 10 else ''}; check the network's input scale, weights and "
        f"precision, or take more steps"
    )
