"""What a closed-form fit keeps of a batch: the inputs of the heads' last layer, and what they are regressed on.

A fit makes many passes over the features of one run of the network, so it keeps them. Where they exceed the memory set
aside for them, each image keeps a window of its positions, a random tile of it: fewer rows of every image, and never a
second run of the network. A k x k kernel sees k // 2 positions beyond the window; these are kept around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from optcov.covariances import Regression
from optcov.fitting.config import TrainingError


@final
@dataclass(frozen=True)
class Rows:
    """One batch as the closed form sees it."""

    inputs: Tensor  # of the last layer, (B, F, h + 2 edge, w + 2 edge) or (B, F)
    times: Tensor  # (B,)
    log_snr: Tensor  # (B,), float32
    regressions: Mapping[str, Regression]
    edge: int = 0  # positions around a window that its kernel sees; 0 of whole images, beyond which there is nothing

    @property
    def nbytes(self) -> int:
        """Memory of all that grows with the image."""
        spreads = [r.spread for r in self.regressions.values() if r.spread is not None]
        targets = [r.target for r in self.regressions.values()]
        return sum(tensor.nbytes for tensor in (self.inputs, *targets, *spreads))

    def part(self, index: Tensor) -> Rows:
        """Some of its images, by number."""
        own = index.to(self.inputs.device)
        regressions = {name: regression.part(index) for name, regression in self.regressions.items()}
        times, log_snr = self.times[index.to(self.times.device)], self.log_snr[own]
        return Rows(self.inputs[own], times, log_snr, regressions, self.edge)

    def inner(self, values: Tensor) -> Tensor:
        """Values (B, C, h + 2 edge, w + 2 edge) of the positions inside the window, (B, C, h, w)."""
        return values[..., self.edge : -self.edge, self.edge : -self.edge] if self.edge else values

    def outer(self, values: Tensor) -> Tensor:
        """The inverse of `inner`, with zeros around the window."""
        return functional.pad(values, [self.edge] * 4) if self.edge else values


def kernel_edge(layer: nn.Module) -> int:
    """How many positions beyond its own a linear layer sees on each side."""
    return int(layer.kernel_size[0]) // 2 if isinstance(layer, nn.Conv2d) else 0


def window_side(inputs: Sequence[int], edge: int, whole: int, budget: float) -> int | None:
    """Side of the largest window whose rows take at most a budget of bytes per image; None: the whole image fits.

    inputs: shape (F, h, w) or (F,) of an image's features. whole: bytes of an image's rows.
    """
    if whole <= budget:
        return None
    if len(inputs) == 3:
        features, height, width = inputs
        others = whole / (height * width) - 4 * features  # bytes of targets per position
        for side in range(min(height, width), 0, -1):
            if 4 * features * (side + 2 * edge) ** 2 + others * side**2 <= budget:
                return side
    raise TrainingError(
        f"the features of an image take {whole:,} bytes, and there is room for {budget:,.0f} an image; use fewer images"
    )


def cut(rows: Rows, side: int, edge: int, places: Tensor) -> Rows:
    """One tile of each image, of at most side x side positions.

    Tiles cover the image once, but for a few positions that two of them share, so that every position is as likely as
    any other. Windows at any place would leave the borders out, where images are plainer than elsewhere.

    places: two numbers in [0, 1) per image, (B, 2): which tile.
    """
    height, width = rows.inputs.shape[-2:]
    (tall, tops), (wide, lefts) = _tiles(height, side, places[:, 0]), _tiles(width, side, places[:, 1])

    def windows(values: Tensor, beyond: int = 0) -> Tensor:
        scale = (values.shape[-1] - 2 * beyond) // width  # pixels of a position
        down, across = scale * tall + 2 * beyond, scale * wide + 2 * beyond
        pieces = [
            image[..., scale * top : scale * top + down, scale * left : scale * left + across]
            for image, top, left in zip(values, tops, lefts, strict=True)
        ]
        return torch.stack(pieces)

    regressions = {
        name: replace(r, target=windows(r.target), spread=None if r.spread is None else windows(r.spread))
        for name, r in rows.regressions.items()
    }
    inputs = windows(functional.pad(rows.inputs, [edge] * 4), edge)
    return Rows(inputs, rows.times, rows.log_snr, regressions, edge)


def _tiles(length: int, side: int, places: Tensor) -> tuple[int, list[int]]:
    """Length of equal tiles of at most `side` that cover a length, and where the one at each place in [0, 1) starts."""
    tiles = -(-length // side)
    size = -(-length // tiles)
    return size, ((places * tiles).long() * (length - size) // max(tiles - 1, 1)).tolist()
