"""SiLU(norm(h)): what a backbone and its heads make of the features h, and need to make only once.

The heads of a fit start with the backbone's own normalisation, and a closed form never changes it. Then the backbone
has computed a head's first two operations on the way to its own output. A head trained by gradient descent has other
weights in its normalisation, but the same mean and deviation of every group, which cost the most; with y = norm(h) of
the backbone, of weight w and bias b, its own normalisation of weight w' and bias b' is

    norm'(h) = (y - b) w' / w + b'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

LARGEST_STRETCH = 16.0  # of the rounding errors of y, by w' / w and by the removal of b


@final
@dataclass(frozen=True)
class Activation:
    """norm(features) and SiLU(norm(features)) as a backbone has computed them."""

    norm: nn.GroupNorm
    normalised: Tensor  # (B, F, *D)
    values: Tensor  # (B, F, *D)

    def serves(self, norm: nn.GroupNorm) -> bool:
        """Whether a head's own normalisation would give the same, and no gradient is to reach its weights.

        Weights on another device than the CPU are not compared: the loop would wait for it.
        """
        if not self._same_groups(norm):
            return False
        gradient = torch.is_grad_enabled()
        for own, other in ((norm.weight, self.norm.weight), (norm.bias, self.norm.bias)):
            if own is None or other is None:
                if own is not other:
                    return False
                continue
            if not (own.is_cpu and other.is_cpu) or (gradient and (own.requires_grad or other.requires_grad)):
                return False
            if own.dtype != other.dtype or not torch.equal(own, other):
                return False
        return True

    def rescaled(self, norm: nn.GroupNorm) -> Tensor | None:
        """norm(features) by a head's own normalisation, (B, F, *D), in one pass over what is known.

        None if that would be another number (other groups, too small a w to divide by), or a gradient is wanted.
        """
        y, w, b = self.normalised, self.norm.weight, self.norm.bias
        weights = (w, b, norm.weight, norm.bias)
        if any(tensor is None for tensor in weights) or not (self._same_groups(norm) and _known(*weights, y)):
            return None
        if not bool((norm.weight.abs() * (1 + b.abs()) < LARGEST_STRETCH * w.abs()).all()):
            return None
        return functional.batch_norm(y, b, torch.ones_like(w), norm.weight / w, norm.bias, eps=0.0)

    def _same_groups(self, norm: nn.GroupNorm) -> bool:
        return (norm.num_groups, norm.num_channels, norm.eps) == (
            self.norm.num_groups,
            self.norm.num_channels,
            self.norm.eps,
        )


def activated(norm: nn.GroupNorm, features: Tensor, known: Activation | None = None) -> Tensor:
    """SiLU(norm(features)), (B, F, *D), from what is known of it as far as the normalisations agree."""
    if known is not None and known.serves(norm):
        return known.values
    normalised = None if known is None else known.rescaled(norm)
    if normalised is None:
        normalised = norm(features)
    return functional.silu(normalised, inplace=not normalised.requires_grad)  # fresh: nobody else reads it


def _known(first: Tensor, *others: Tensor) -> bool:
    """Whether tensors are constants on the CPU, all of one type."""
    return all(
        tensor.is_cpu and tensor.dtype == first.dtype and not (torch.is_grad_enabled() and tensor.requires_grad)
        for tensor in (first, *others)
    )
