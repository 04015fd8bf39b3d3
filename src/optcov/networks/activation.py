"""SiLU(norm(h)): what a backbone and its heads make of the features h, and need to make only once.

The heads of a fit start with the backbone's own normalisation, and a closed form never changes it. Then the backbone
has computed a head's first two operations on the way to its own output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional


@final
@dataclass(frozen=True)
class Activation:
    """SiLU(norm(features)) as a backbone has computed it."""

    norm: nn.GroupNorm
    values: Tensor  # (B, F, *D)

    def serves(self, norm: nn.GroupNorm) -> bool:
        """Whether a head's own normalisation would give the same, and no gradient is to reach its weights.

        Weights on another device than the CPU are not compared: the loop would wait for it.
        """
        return (
            (norm.num_groups, norm.num_channels, norm.eps)
            == (self.norm.num_groups, self.norm.num_channels, self.norm.eps)
            and _same_constant(norm.weight, self.norm.weight)
            and _same_constant(norm.bias, self.norm.bias)
        )


def activated(norm: nn.GroupNorm, features: Tensor, known: Activation | None = None) -> Tensor:
    """SiLU(norm(features)), (B, F, *D): what is known of it, if that is by the same normalisation."""
    if known is not None and known.serves(norm):
        return known.values
    normalised = norm(features)
    return functional.silu(normalised, inplace=not normalised.requires_grad)  # fresh: nobody else reads it


def _same_constant(own: Tensor | None, other: Tensor | None) -> bool:
    if own is None or other is None:
        return own is other
    if torch.is_grad_enabled() and (own.requires_grad or other.requires_grad):
        return False
    return own.is_cpu and other.is_cpu and own.dtype == other.dtype and torch.equal(own, other)
