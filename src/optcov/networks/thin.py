"""A convolution to very few channels, as one matrix product and a sum of shifted images.

Libraries tune convolutions for many output channels; a head has one to three, and takes a quarter of the time this way.
Same weights, same result as nn.Conv2d(..., 3, padding=1) but for rounding. A kernel of 1x1 is a linear layer on tokens.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional


@final
class ThinConv2d(nn.Conv2d):
    """nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2) for few output channels; kernel is odd."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 3):
        super().__init__(in_channels, out_channels, kernel, padding=kernel // 2)

    def forward(self, input: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H, W)."""
        assert self.bias is not None
        return thin_convolution(input, self.weight, self.bias)


def thin_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve x (B, F, H, W) by weight (C, F, k, k), k odd: (B, C, H, W)."""
    side = weight.shape[-1]
    # a pixel gives its share to its neighbours: seen from the pixel, the kernel is mirrored
    kernel = weight.flip(2, 3).permute(0, 2, 3, 1).flatten(0, 2)  # (k k C, F)
    shares = torch.bmm(kernel.expand(len(x), -1, -1), x.flatten(2))  # (B, k k C, H W); `@` would copy x to broadcast
    if side == 1:
        shifted = shares.reshape(len(x), len(weight), *x.shape[2:])
    elif shares.requires_grad:  # the gradient of fold is one pass, that of nine sums is nine
        shifted = functional.fold(shares, x.shape[2:], side, padding=side // 2)
    else:
        shifted = _sum_shifted(shares.reshape(len(x), len(weight), side, side, *x.shape[2:]))
    # under autocast the product is in half precision, and so is the result, as that of a convolution
    return shifted + bias.to(shares.dtype)[:, None, None]


def _sum_shifted(shares: Tensor) -> Tensor:
    """Shift the images (B, C, k, k, H, W) by up to k // 2 down and right, and sum them: (B, C, H, W)."""
    side, (height, width) = shares.shape[2], shares.shape[-2:]
    edge = side // 2
    total = shares.new_zeros(*shares.shape[:2], height + 2 * edge, width + 2 * edge)
    for down in range(side):
        for right in range(side):
            total[..., down : down + height, right : right + width] += shares[:, :, down, right]
    return total[..., edge:-edge, edge:-edge]


def thin_weight_gradient(x: Tensor, gradient: Tensor, side: int = 3) -> Tensor:
    """Gradient of the weights, (C, F, k, k), by that of the output (B, C, H, W), summed over samples in float64."""
    neighbours = functional.unfold(gradient, side, padding=side // 2)  # (B, k k C, H W)
    total = torch.bmm(neighbours, x.flatten(2).mT).sum(0, dtype=torch.float64)  # (k k C, F)
    return total.reshape(gradient.shape[1], side, side, x.shape[1]).flip(1, 2).permute(0, 3, 1, 2)
