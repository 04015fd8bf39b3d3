"""What a closed-form fit keeps of a batch: the inputs of the heads' last layer, and what they are regressed on.

A fit makes many passes over the features of one run of the network, so it keeps them. Where they exceed the memory set
aside for them, each image keeps a square window of its positions, at a random place: fewer rows of every image, and
never a second run of the network. A k x k kernel sees k // 2 positions beyond the window; these are kept around it.
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
    predicted: Mapping[str, Tensor]  # by unit, (B, C, *D), of heads that ask for it
    times: Tensor  # (B,)
    log_snr: Tensor  # (B,), float32
    regressions: Mapping[str, Regression]
    edge: int = 0  # positions around a window that its kernel sees; 0 of whole images, beyond which there is nothing

    @property
    def nbytes(self) -> int:
        """Memory of all that grows with the image."""
        spreads = [r.spread for r in self.regressions.values() if r.spread is not None]
        targets = [r.target for r in self.regressions.values()]
        return sum(tensor.nbytes for tensor in (self.inputs, *self.predicted.values(), *targets, *spreads))

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
        others = whole / (height * width) - 4 * features  # bytes of predictions and targets per position
        for side in range(min(height, width), 0, -1):
            if 4 * features * (side + 2 * edge) ** 2 + others * side**2 <= budget:
                return side
    raise TrainingError(
        f"the features of an image take {whole:,} bytes, and there is room for {budget:,.0f} an image; use fewer images"
    )


def cut(rows: Rows, side: int, edge: int, places: Tensor) -> Rows:
    """A window of side x side positions of each image.

    places: two numbers in [0, 1) per image, (B, 2): where the window lies.
    """
    height, width = rows.inputs.shape[-2:]
    corners = (places * torch.tensor([height - side + 1, width - side + 1])).long().tolist()

    def windows(values: Tensor, beyond: int = 0) -> Tensor:
        scale = (values.shape[-1] - 2 * beyond) // width  # pixels of a position
        length = scale * side + 2 * beyond
        pieces = [
            image[..., scale * top : scale * top + length, scale * left : scale * left + length]
            for image, (top, left) in zip(values, corners, strict=True)
        ]
        return torch.stack(pieces)

    regressions = {
        name: replace(r, target=windows(r.target), spread=None if r.spread is None else windows(r.spread))
        for name, r in rows.regressions.items()
    }
    predicted = {unit: windows(values) for unit, values in rows.predicted.items()}
    inputs = windows(functional.pad(rows.inputs, [edge] * 4), edge)
    return Rows(inputs, predicted, rows.times, rows.log_snr, regressions, edge)
