"""One table for both directions: which foreign key is which of ours, and how its numbers are arranged.

A table is a list of entries. Reading it from left to right imports, from right to left exports; the shapes a
foreign file must have are those of exporting our empty network. So the two directions cannot disagree, and
every key is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.checkpoints.errors import CheckpointError
from optcov.networks.unet_config import PLAIN_FLOATS, no_plain_floats

State = Mapping[str, Tensor]

MAX_LISTED = 1000  # keys in an error, each cut to MAX_LENGTH characters; no network here has as many
MAX_LENGTH = 200


@final
@dataclass(frozen=True)
class Layout:
    """How one foreign tensor holds one or more of ours: how to take it apart, and how to put it together again."""

    to_ours: Callable[[Tensor], tuple[Tensor, ...]]
    to_foreign: Callable[[Sequence[Tensor]], Tensor]


SAME = Layout(lambda foreign: (foreign,), lambda ours: ours[0])
TRANSPOSED = Layout(lambda foreign: (foreign.T,), lambda ours: ours[0].T)  # a matrix that multiplies from the right


def pointwise(dimensions: int) -> Layout:
    """A convolution with a kernel of one pixel, (out, in, 1, ...), is our linear layer, (out, in)."""
    return Layout(
        lambda foreign: (foreign.flatten(1),), lambda ours: ours[0].reshape(*ours[0].shape, *[1] * dimensions)
    )


def headwise_qkv(heads: int, dimensions: int) -> Layout:
    """Query, key and value of all heads in one tensor whose rows are ordered [head][query, key, value].

    dimensions: trailing ones of the kernel; 0 for the bias.
    """

    def to_ours(foreign: Tensor) -> tuple[Tensor, ...]:
        columns = foreign.shape[1 : foreign.ndim - dimensions]
        parts = foreign.reshape(heads, 3, -1, *columns)
        return tuple(parts[:, i].reshape(-1, *columns) for i in range(3))

    def to_foreign(ours: Sequence[Tensor]) -> Tensor:
        columns = ours[0].shape[1:]
        rows = [part.reshape(heads, -1, *columns) for part in ours]
        return torch.stack(rows, dim=1).reshape(-1, *columns, *[1] * dimensions)

    return Layout(to_ours, to_foreign)


@final
@dataclass(frozen=True)
class Entry:
    """One foreign tensor, and the tensors of ours that it holds."""

    foreign: str
    ours: tuple[str, ...]
    layout: Layout = SAME


Table = tuple[Entry, ...]


def weight_and_bias(foreign: str, ours: str) -> list[Entry]:
    """The two entries of a layer that is arranged alike on both sides."""
    return [Entry(f"{foreign}.{name}", (f"{ours}.{name}",)) for name in ("weight", "bias")]


def layers(names: Mapping[str, str], foreign: str = "", ours: str = "") -> list[Entry]:
    """Entries of several layers, by their foreign and our names, below prefixes such as "down.0."."""
    return [entry for a, b in names.items() for entry in weight_and_bias(f"{foreign}{a}", f"{ours}{b}")]


def import_state(table: Table, foreign: State, empty: State) -> dict[str, Tensor]:
    """Our tensors as float32, from a foreign state; `empty` says which tensors of what shape to expect."""
    check_keys(table, foreign, empty)
    result: dict[str, Tensor] = {}
    for entry in table:
        parts = entry.layout.to_ours(foreign[entry.foreign])
        for name, part in zip(entry.ours, parts, strict=True):
            # a copy: the file is only mapped into memory, and may change after the import
            result[name] = torch.empty(part.shape, dtype=torch.float32).copy_(part)
            if not bool(result[name].isfinite().all()):
                raise CheckpointError(f"{entry.foreign} holds NaN or infinite numbers; the file is damaged")
    return result


def export_state(table: Table, ours: State) -> dict[str, Tensor]:
    """A foreign state from our tensors."""
    return {
        entry.foreign: entry.layout.to_foreign([ours[name].detach().cpu() for name in entry.ours]).contiguous()
        for entry in table
    }


def check_keys(table: Table, foreign: State, empty: State) -> None:
    """Raise a CheckpointError that lists every key which is missing, unexpected, or of a wrong shape or type."""
    expected = {
        entry.foreign: tuple(entry.layout.to_foreign([empty[name] for name in entry.ours]).shape) for entry in table
    }
    wrong = [
        f"{key} has shape {tuple(foreign[key].shape)} instead of {shape}"
        for key, shape in expected.items()
        if key in foreign and tuple(foreign[key].shape) != shape
    ]
    problems = [
        *_listing("missing", [key for key in expected if key not in foreign]),
        *_listing("unexpected", [key for key in foreign if key not in expected]),
        *_listing("mis-shaped", wrong),
        *_mistyped({key: foreign[key] for key in expected if key in foreign}),
    ]
    if problems:
        raise CheckpointError("; ".join(problems))


def _mistyped(state: State) -> list[str]:
    keys = [key for key, tensor in state.items() if tensor.dtype not in PLAIN_FLOATS]
    more = f" ({len(keys) - 1} more keys have the same problem)" if len(keys) > 1 else ""
    return [f"{keys[0]} {no_plain_floats(state[keys[0]])}{more}"] if keys else []


def _listing(what: str, keys: Iterable[str]) -> list[str]:
    found = list(keys)
    listed = [key[:MAX_LENGTH] for key in found[:MAX_LISTED]]
    more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
    return [f"{len(found)} {what} keys: {', '.join(listed)}{more}"] if found else []
