"""Training batches (x_0, t, eps) whose randomness depends on (seed, step) alone.

Images go through seeded permutations, one per epoch; flips, times and noise come from a generator seeded by the step.
So a step has the same batch after a restart, and whatever came before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from optcov.networks.times import FIRST_TIME
from optcov.schedule import Schedule
from optcov.training.config import TrainingError

MOST = 2**20  # images of a batch: beyond, a slip of the finger would fill the memory


class Source(Protocol):
    """Where clean data comes from; `optcov.data.ImageSet` is one."""

    def __len__(self) -> int: ...

    def unit(self, index: Tensor) -> Tensor:
        """Data points at the index, float32 (m, *D), scaled as the network sees them."""
        ...


@final
@dataclass(frozen=True)
class Batch:
    """What a step of training draws."""

    x_0: Tensor  # (B, *D)
    times: Tensor  # (B,), times of the schedule
    noise: Tensor  # (B, *D)

    def part(self, index: int, parts: int) -> Batch:
        """One of several equal parts, for one of several processes."""
        return Batch(*(tensor.tensor_split(parts)[index] for tensor in (self.x_0, self.times, self.noise)))

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; times stay on the CPU, where schedules are computed."""
        return Batch(self.x_0.to(device), self.times, self.noise.to(device))


@final
@dataclass(frozen=True)
class Batches:
    """Batches by step number 1, 2, ...

    Times are uniform on [1e-5, 1], or on 1..N of a discrete schedule; those of one batch are stratified (one in each
    of B equal parts), which leaves the expected loss as it is and lowers its variance.
    """

    source: Source
    schedule: Schedule
    batch_size: int
    seed: int = 0
    flip: bool = False  # mirror each image with probability 1/2

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MOST:
            raise TrainingError(f"batch_size = {self.batch_size} must be at least 1 and at most {MOST}")
        if len(self.source) < 1:
            raise TrainingError("there is no data to train on")

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        generator = step_generator(self.seed, "step", step)
        x_0 = self.source.unit(self._indices(step))
        if self.flip:
            mirrored = torch.rand(len(x_0), generator=generator) < 0.5
            x_0 = torch.where(mirrored[:, None, None, None], x_0.flip(-1), x_0)
        times = draw_times(self.schedule, len(x_0), generator)
        return Batch(x_0, times, torch.randn(x_0.shape, generator=generator))

    def _indices(self, step: int) -> Tensor:
        """Positions (step - 1) B .. step B - 1 in the endless chain of the epochs' permutations."""
        first, count = (step - 1) * self.batch_size, len(self.source)
        pieces, position = [], first
        while position < first + self.batch_size:
            epoch, offset = divmod(position, count)
            order = torch.randperm(count, generator=step_generator(self.seed, "epoch", epoch))
            piece = order[offset : offset + first + self.batch_size - position]
            pieces.append(piece)
            position += len(piece)
        return torch.cat(pieces)


def draw_times(schedule: Schedule, count: int, generator: torch.Generator) -> Tensor:
    """Stratified times, each uniform over the schedule's training times, in random order: (count,)."""
    strata = torch.randperm(count, generator=generator).double()
    uniform = (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    if schedule.steps is None:
        return FIRST_TIME + (1 - FIRST_TIME) * uniform
    return 1 + (uniform * schedule.steps).long().clamp(max=schedule.steps - 1)


def step_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """A generator of its own for each (seed, purpose, number)."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") - 2**63)
