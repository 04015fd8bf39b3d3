"""The residual head: a residual block that sees the time embedding, then a convolution head."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.nn import functional

from optcov.networks.activation import Activation, activated
from optcov.networks.heads.base import ConvolutionalHead, group_norm
from optcov.networks.thin import ThinConv2d


@final
class ResidualHead(ConvolutionalHead):
    """A residual block with the time embedding, then normalisation, SiLU, 3x3 convolution.

    The block is (x + conv2(SiLU(norm2(conv1(SiLU(norm1(x))) + linear(SiLU(time)))))) times residual_scale. With
    scale_shift, the time embedding multiplies and shifts the second normalisation instead. If hidden_channels differs
    from in_channels, the block has a 1x1 shortcut.
    """

    kind = "residual"
    norm: nn.GroupNorm

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        time_channels: int,
        groups: int = 32,
        eps: float = 1e-5,
        transform: str = "exp",
        hidden_channels: int | None = None,
        scale_shift: bool = False,
        residual_scale: float = 1.0,
        dropout: float = 0.0,
    ):
        hidden_channels = in_channels if hidden_channels is None else hidden_channels
        super().__init__(transform, locals())
        hidden = hidden_channels
        self.scale_shift, self.residual_scale = scale_shift, residual_scale
        self.norm1 = group_norm(groups, in_channels, eps)
        self.conv1 = nn.Conv2d(in_channels, hidden, 3, padding=1)
        self.time = nn.Linear(time_channels, 2 * hidden if scale_shift else hidden)
        self.norm2 = group_norm(groups, hidden, eps)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1)
        self.shortcut = nn.Identity() if hidden == in_channels else nn.Conv2d(in_channels, hidden, 1)
        self.norm = group_norm(groups, hidden, eps)
        self.conv = ThinConv2d(hidden, out_channels)
        self._start_at_zero()

    def inputs(
        self,
        features: Tensor,
        time_embedding: Tensor | None = None,
        activation: Activation | None = None,
        hidden: bool = True,
    ) -> Tensor:
        if time_embedding is None:
            raise ValueError(
                "a residual head needs the backbone's time embedding, but none was tapped; "
                'name the module that computes it: Backbone(module, time_embedding="...")'
            )
        return activated(self.norm, self._block(features, time_embedding, activation))

    def _block(self, x: Tensor, time_embedding: Tensor, activation: Activation | None) -> Tensor:
        time = self.time(functional.silu(time_embedding))[..., None, None]
        hidden = self.conv1(activated(self.norm1, x, activation))
        if self.scale_shift:
            scale, shift = time.chunk(2, dim=1)
            hidden = self.norm2(hidden) * (1 + scale) + shift
        else:
            hidden = self.norm2(hidden + time)
        hidden = self.conv2(self.dropout(functional.silu(hidden)))
        result: Tensor = (self.shortcut(x) + hidden) * self.residual_scale
        return result
