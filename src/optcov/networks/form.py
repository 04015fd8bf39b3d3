"""The form of an output layer: how it makes pixels of features.

A layer reads features (B, F, h, w). It convolves them by a k x k kernel to p^2 C channels, and each position becomes a
patch of p x p pixels: (B, C, h p, w p). A linear layer on tokens is k = 1, the tokens being the positions; `conv_out`
of a U-Net is p = 1. The channels of a position are ordered by the rows p and columns q of its patch and the image's
channels c:

    pqc    as DiT, PixArt and SD3 unpatchify
    cpq    as Flux packs its latents, and torch's pixel_shuffle
    c      of data that are vectors (B, C): a linear layer, seen as k = p = 1 on a single position
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

VECTORS = "c"
ORDERS = ("pqc", "cpq", VECTORS)


@final
@dataclass(frozen=True)
class Form:
    """Side of the kernel, side of the patch, and order of the channels.

    >>> form = Form(kernel=1, patch=2)
    >>> pixels = torch.arange(48.0).reshape(1, 3, 4, 4)
    >>> form.channels(pixels).shape, torch.equal(form.pixels(form.channels(pixels)), pixels)
    (torch.Size([1, 12, 2, 2]), True)
    """

    kernel: int = 3
    patch: int = 1
    order: str = "pqc"

    def __post_init__(self) -> None:
        if type(self.kernel) is not int or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel = {self.kernel!r} of a head must be an odd number, such as 1 or 3")
        if type(self.patch) is not int or self.patch < 1:
            raise ValueError(f"patch = {self.patch!r} of a head must be a whole number of pixels, 1 or more")
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r} of a head's channels; choose one of {', '.join(ORDERS)}")
        if self.order == VECTORS and (self.kernel, self.patch) != (1, 1):
            raise ValueError(
                f"a head of vectors has neither kernel nor patch, got {self.kernel} and {self.patch}; use 1 and 1"
            )

    def config(self) -> dict[str, Any]:
        """What differs from a 3x3 convolution to pixels, by name, as plain JSON values."""
        usual = Form()
        return {name: value for name, value in vars(self).items() if value != getattr(usual, name)}

    def pixels(self, channels: Tensor) -> Tensor:
        """(B, p^2 C, h, w) -> (B, C, h p, w p), or (B, C) of vectors."""
        if self.order == VECTORS:
            return channels.flatten(1)
        if self.patch == 1:
            return channels
        count, _, height, width = channels.shape
        p = self.patch
        if self.order == "pqc":
            parts = torch.einsum("bpqchw->bchpwq", channels.reshape(count, p, p, -1, height, width))
        else:
            parts = torch.einsum("bcpqhw->bchpwq", channels.reshape(count, -1, p, p, height, width))
        return parts.reshape(count, -1, height * p, width * p)

    def channels(self, pixels: Tensor) -> Tensor:
        """(B, C, h p, w p) -> (B, p^2 C, h, w), the inverse of `pixels`."""
        if self.order == VECTORS:
            return pixels[:, :, None, None]
        if self.patch == 1:
            return pixels
        count, _, height, width = pixels.shape
        p = self.patch
        parts = pixels.reshape(count, -1, height // p, p, width // p, p)
        order = "bchpwq->bpqchw" if self.order == "pqc" else "bchpwq->bcpqhw"
        return torch.einsum(order, parts).reshape(count, -1, height // p, width // p)
