"""The dense head, for features without pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from optcov.networks.activation import Activation
from optcov.networks.heads.base import Head


@final
class DenseHead(Head):
    """A multilayer perceptron over features without pixels, (B, F) -> (B, out_channels)."""

    kind = "dense"

    def __init__(self, in_channels: int, out_channels: int, hidden: tuple[int, ...] = (), transform: str = "exp"):
        super().__init__(transform, locals())
        widths = [in_channels, *hidden]
        self.norm = nn.LayerNorm(in_channels)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.linear = nn.Linear(widths[-1], out_channels)
        self._start_at_zero()

    @property
    def last(self) -> nn.Module:
        """The last, linear layer."""
        return self.linear

    def inputs(
        self, features: Tensor, time_embedding: Tensor | None = None, activation: Activation | None = None
    ) -> Tensor:
        """What the last layer sees."""
        hidden = functional.silu(self.norm(features))
        for layer in self.layers:
            hidden = functional.silu(layer(hidden))
        return hidden
