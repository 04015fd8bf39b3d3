"""How what a head says gets from the network to the scheduler: a pipeline passes the network's output alone.

Pipelines mix, cut and rescale the output between the two, so that a head that travelled in its channels would be mixed
as well. Here it waits beside: the network leaves it under the name that it shares with its scheduler, and the scheduler
takes it at its next step. Each thread has its own.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor


@final
@dataclass
class _Letters:
    """What was left since the last step, at one timestep."""

    timestep: float = float("nan")
    heads: list[Tensor] = field(default_factory=list)


class _Boxes(threading.local):
    """Letters by the name of the box, of this thread."""

    def __init__(self) -> None:
        self.letters: dict[str, _Letters] = {}


_BOXES = _Boxes()


def leave(link: str, head: Tensor, timestep: float) -> None:
    """Leave what a head said of a batch, for the step at this timestep; what waits from another one goes."""
    waiting = _BOXES.letters.get(link)
    if waiting is None or waiting.timestep != timestep:
        waiting = _BOXES.letters[link] = _Letters(timestep)
    waiting.heads.append(head)


def empty(link: str) -> None:
    """Throw away what waits."""
    _BOXES.letters.pop(link, None)


def take(link: str, sample: Tensor, guided_half: str) -> Tensor:
    """What the head said of this sample: that of the conditional prediction, where a pipeline guides.

    A pipeline guides by a batch of two halves, or by a second call of the network; the first call is then the one with
    the prompt.
    """
    waiting = _BOXES.letters.pop(link, None)
    if waiting is None:
        raise ValueError(
            "the network left no head for this step; put its scheduler and its network into one pipeline by "
            "optcov.attach(pipeline, bundle, method), and step after each call of the network"
        )
    head, count = waiting.heads[0], len(sample)
    if len(head) == 2 * count:
        head = head[count:] if guided_half == "second" else head[:count]
    if head.shape != sample.shape:
        raise ValueError(
            f"the head is of shape {tuple(head.shape)}, but the sample of {tuple(sample.shape)}; step with the batch "
            f"that the network has seen"
        )
    return head


def both_halves(head: Tensor) -> Tensor:
    """The first half's head for both, (B, *D): of a batch whose second half is the same without its condition."""
    return torch.cat([head[: len(head) // 2]] * 2)
