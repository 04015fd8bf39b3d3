"""Hidden layers of a head: two convolutions between the features and the last, linear layer."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.nn import functional


@final
class HiddenLayers(nn.Module):
    """h + SiLU(conv2(h)) with h = SiLU(conv1(x)): (B, F, h, w) -> (B, channels, h, w)."""

    def __init__(self, in_channels: int, channels: int, kernel: int = 3):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.conv1(x))
        return hidden + functional.silu(self.conv2(hidden))
