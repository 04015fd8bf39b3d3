"""The convolution head: out(conv3x3(SiLU(norm(h))))."""

from __future__ import annotations

from typing import final

from optcov.networks.heads.base import ConvolutionalHead, group_norm
from optcov.networks.thin import ThinConv2d


@final
class ConvHead(ConvolutionalHead):
    """Normalisation, SiLU, 3x3 convolution: the paper's head for most data sets."""

    kind = "conv"

    def __init__(
        self, in_channels: int, out_channels: int, groups: int = 32, eps: float = 1e-5, transform: str = "exp"
    ):
        super().__init__(transform)
        self.config = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "groups": groups,
            "eps": eps,
            "transform": transform,
        }
        self.norm = group_norm(groups, in_channels, eps)
        self.conv = ThinConv2d(in_channels, out_channels)
        self._start_at_zero()
