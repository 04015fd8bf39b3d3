"""Training batches (x_0, t, eps, condition) whose randomness depends on (seed, step) alone.

Images go through seeded permutations, one per epoch; flips, times, noise and which labels are left out come from a
generator seeded by the step. So a step has the same batch after a restart, and whatever came before it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from optcov.data import flip_half
from optcov.fitting.config import TrainingError
from optcov.identity import condition_identity
from optcov.networks.classes import LABELS
from optcov.prediction import Source, check_condition, condition_of, take
from optcov.schedule import Schedule

MOST = 2**20  # images of a batch: beyond, a slip of the finger would fill the memory


@final
@dataclass(frozen=True)
class Conditioned:
    """A source with what the network is told about its data, each a tensor with one entry per data point.

    What else the source knows (`shape`, `checksum`, ...) is asked of the source itself.
    """

    source: Source
    known: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_condition(self.known, len(self.source))

    @staticmethod
    def by_labels(source: Source) -> Conditioned:
        """The source's labels are the condition."""
        labels = getattr(source, "labels", None)
        if not isinstance(labels, Tensor):
            raise TrainingError("the images have no labels to train on; leave --labels out, or give labelled images")
        return Conditioned(source, {"class_labels": labels})

    def __len__(self) -> int:
        return len(self.source)

    def x_0(self, index: Tensor) -> Tensor:
        """Data points at the index."""
        return self.source.x_0(index)

    def condition(self, index: Tensor) -> dict[str, Tensor]:
        """What the network is told about them."""
        return take(self.known, index)

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "known"):  # not set yet, as in a copy on its way
            raise AttributeError(name)
        return getattr(self.source, name)


def batch_count(images: int, batch_size: int) -> int:
    """How many batches have about so many images."""
    return max(1, round(images / batch_size))


def condition_entry(source: Source) -> dict[str, str] | None:
    """The entry of an identity for what a source tells a network; None if it tells nothing."""
    return condition_identity(condition_of(source, torch.arange(len(source))))


@final
@dataclass(frozen=True)
class Batch:
    """What a step of training draws."""

    x_0: Tensor  # (B, *D)
    times: Tensor  # (B,), times of the schedule
    noise: Tensor  # (B, *D)
    condition: Mapping[str, Tensor] = field(default_factory=dict)  # what the network is told besides, each (B, ...)
    signs: Tensor | None = None  # with which a Jacobian is probed, (B, *D), int8

    def part(self, index: int, parts: int) -> Batch:
        """One of several equal parts, for one of several processes."""
        x_0, times, noise = (tensor.tensor_split(parts)[index] for tensor in (self.x_0, self.times, self.noise))
        condition = {name: tensor.tensor_split(parts)[index] for name, tensor in self.condition.items()}
        signs = None if self.signs is None else self.signs.tensor_split(parts)[index]
        return Batch(x_0, times, noise, condition, signs)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; times stay on the CPU, where schedules are computed."""
        condition = {name: tensor.to(device) for name, tensor in self.condition.items()}
        signs = None if self.signs is None else self.signs.to(device)
        return Batch(self.x_0.to(device), self.times, self.noise.to(device), condition, signs)


@final
@dataclass(frozen=True)
class NoiseLevels:
    """Times whose log of noise over signal is normal (EDM, Karras et al. 2022), instead of uniform times.

    The defaults are wider than EDM's -1.2 and 1.2, because a likelihood asks of all levels.
    """

    mean: float = -0.8
    std: float = 1.6

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise TrainingError(f"noise levels need a finite mean and a positive std, got {self.mean} and {self.std}")

    def times(self, schedule: Schedule, uniform: Tensor) -> Tensor:
        """Times at these quantiles, (B,); levels beyond the schedule's own become its first or last."""
        log_snr = -2 * (self.mean + self.std * torch.special.ndtri(uniform))
        ends = float(schedule.log_snr(schedule.final_time)), float(schedule.log_snr(schedule.first_time))
        times = schedule.time_at(log_snr.clamp(*ends))
        return schedule.nearest(times)


@final
@dataclass(frozen=True)
class Labels:
    """How labels condition a network: a share of them becomes the empty class, so that guidance works later."""

    classes: int
    empty_share: float = 0.1

    def __post_init__(self) -> None:
        if self.classes < 1 or not 0 <= self.empty_share <= 1:
            raise TrainingError(
                f"labels need at least one class and a share of empty ones in [0, 1], got {self.classes} classes and "
                f"{self.empty_share}"
            )

    def condition(self, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The condition of a batch by its labels (B,); the class number `classes` is the empty one."""
        chosen = torch.rand(len(labels), generator=generator) < self.empty_share
        return emptied({LABELS: labels}, chosen, {LABELS: torch.tensor([self.classes])})


def emptied(condition: Mapping[str, Tensor], chosen: Tensor, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A condition (B, ...) with the empty one, each (1, ...), in the place of the chosen entries (B,)."""
    for name, value in condition.items():
        if name not in empty or value.shape[1:] != empty[name].shape[1:]:
            there = f"{tuple(empty[name].shape[1:])}" if name in empty else "missing"
            raise TrainingError(
                f"condition {name!r} has entries of shape {tuple(value.shape[1:])}, but that of the empty condition is "
                f"{there}; they must agree"
            )
    rows = {name: chosen.reshape(-1, *[1] * (value.ndim - 1)) for name, value in condition.items()}
    return {name: torch.where(rows[name], empty[name].to(value), value) for name, value in condition.items()}


@final
@dataclass(frozen=True)
class Batches:
    """Batches by step number 1, 2, ...

    Times are uniform over those of the schedule (`Schedule.quantile`); those of one batch are stratified (one in each
    of B equal parts), which leaves the expected loss as it is and lowers its variance.
    """

    source: Source
    schedule: Schedule
    batch_size: int
    seed: int = 0
    flip: bool = False  # mirror each image with probability 1/2
    levels: NoiseLevels | None = None  # instead of uniform times
    labels: Labels | None = None  # the source's labels become the condition

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MOST:
            raise TrainingError(f"batch_size = {self.batch_size} must be at least 1 and at most {MOST}")
        if len(self.source) < 1:
            raise TrainingError("there is no data to train on")
        if self.labels is not None:
            self._check_labels(self.labels.classes)

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        generator = step_generator(self.seed, "step", step)
        index = self._indices(step)
        x_0 = self.source.x_0(index)
        if self.flip:
            x_0 = flip_half(x_0, generator)
        times = draw_times(self.schedule, len(x_0), generator, self.levels)
        noise = torch.randn(x_0.shape, generator=generator)
        condition = condition_of(self._told(), index)
        if self.labels is not None:
            condition |= self.labels.condition(condition["class_labels"], generator)
        signs = torch.randint(0, 2, x_0.shape, generator=step_generator(self.seed, "probe", step), dtype=torch.int8)
        return Batch(x_0, times, noise, condition, 2 * signs - 1)

    def _told(self) -> Source:
        """The source with its condition, which are its labels if these are asked for and it offers nothing itself."""
        offers = self.labels is None or callable(getattr(self.source, "condition", None))
        return self.source if offers else Conditioned.by_labels(self.source)

    def _check_labels(self, classes: int) -> None:
        known = condition_of(self._told(), torch.arange(len(self.source))).get("class_labels")
        if known is None:
            raise TrainingError("the source offers no class_labels, so that no share of them can be left out")
        low, high = (int(end) for end in torch.aminmax(known))
        if not 0 <= low <= high < classes:
            raise TrainingError(f"labels run from {low} to {high}, but {classes} classes are 0 to {classes - 1}")

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


def draw_times(schedule: Schedule, count: int, generator: torch.Generator, levels: NoiseLevels | None = None) -> Tensor:
    """Stratified times in random order, (count,): uniform over the training times, or by their noise levels."""
    strata = torch.randperm(count, generator=generator).double()
    uniform = (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    if levels is not None:
        return levels.times(schedule, uniform)
    return schedule.quantile(uniform)


def step_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """A generator of its own for each (seed, purpose, number)."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") - 2**63)
