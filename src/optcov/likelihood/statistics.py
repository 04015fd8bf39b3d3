"""Means with standard errors, of single images, groups of images, and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    standard_error: float | None  # None if there is only one value to judge by
    count: int  # images, or groups of images

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.standard_error is None else f"{self.mean:.4f} ± {self.standard_error:.4f}"


def estimate(values: Tensor, weights: Tensor | None = None) -> Estimate:
    """Mean of values (n,) and its standard error; weights (n,) are the numbers of images behind each value."""
    values = values.detach().double().cpu().flatten()
    weights = torch.ones_like(values) if weights is None else weights.double().cpu().flatten()
    if values.shape != weights.shape or not bool((weights > 0).any()):
        raise ValueError(
            f"need as many weights as values and one above 0 at least, got {len(weights)} for {len(values)} values"
        )
    values, weights = values[weights > 0], weights[weights > 0]  # a group without images says nothing
    share = weights / weights.sum()
    mean = float((share * values).sum())
    n = len(values)
    if n == 1:
        return Estimate(mean, None, 1)
    variance = float((share.square() * (values - mean).square()).sum()) * n / (n - 1)
    return Estimate(mean, math.sqrt(variance), n)


def paired_difference(values: Tensor, others: Tensor, weights: Tensor | None = None) -> Estimate:
    """Mean of values - others (n,), with the standard error of the paired differences.

    On the same images and noise, two covariances differ far less than the images differ from each other.
    """
    if values.shape != others.shape:
        raise ValueError(
            f"paired values must belong to the same images, got shapes {tuple(values.shape)} and {tuple(others.shape)}"
        )
    return estimate(values - others, weights)
