"""Numbers per sample beside tensors per pixel."""

from __future__ import annotations

import torch
from torch import Tensor


def per_sample(coefficient: Tensor, like: Tensor) -> Tensor:
    """Shape a coefficient, () or (B,), so that it multiplies `like` (B, *D) sample by sample."""
    if coefficient.ndim == 0:  # 0-dim: keeps the dtype of `like`, and needs no transfer to its device
        return coefficient
    if coefficient.shape != (like.shape[0],):
        raise ValueError(
            f"a per-sample coefficient has shape {tuple(coefficient.shape)}, but the batch has {like.shape[0]} "
            f"samples; pass one number, or one number per sample"
        )
    dtype = torch.promote_types(like.dtype, torch.float32)  # a coefficient never loses digits to half precision
    return coefficient.to(like.device, dtype).reshape(-1, *[1] * (like.ndim - 1))


def weighted_sum(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """a x + b y for x and y (B, *D) and coefficients () or (B,), with one pass fewer over memory than written out."""
    if b.ndim == 0:
        return torch.add(per_sample(a, x) * x, y, alpha=float(b))
    return torch.addcmul(per_sample(a, x) * x, per_sample(b, y), y)


def sum_pixels(x: Tensor) -> Tensor:
    """Sum over everything but the batch: (B, *D) -> (B,)."""
    return x.flatten(1).sum(1)
