"""The convolution head: out(conv3x3(SiLU(norm(h)))), or out(layer(h)) of the form of another output layer."""

from __future__ import annotations

from typing import final

from optcov.networks.heads.base import ConvolutionalHead, optional_norm


@final
class ConvHead(ConvolutionalHead):
    """Normalisation, SiLU, 3x3 convolution: the paper's head for most data sets.

    groups=None leaves normalisation and SiLU out. kernel, patch, order: see optcov.networks.form.
    """

    kind = "conv"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        groups: int | None = 32,
        eps: float = 1e-5,
        transform: str = "exp",
        kernel: int = 3,
        patch: int = 1,
        order: str = "pqc",
    ):
        super().__init__(transform, locals())
        self.norm = optional_norm(groups, in_channels, eps)
        self.conv = self._last_layer(in_channels, out_channels)
        self._start_at_zero()
