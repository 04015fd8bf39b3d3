"""The kernel distance (KID): the maximum mean discrepancy of features under a cubic kernel, by torchmetrics.

It is unbiased, so that no limit of many samples is needed; torchmetrics averages it over random subsets.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from optcov.metrics.statistics import MetricError


@final
@dataclass(frozen=True)
class KernelDistance:
    """Mean over subsets, and their spread, which is that of one subset and not the error of the mean.

    The spread is None where every subset holds all images of a side: it would tell nothing of them.
    """

    value: float
    spread: float | None
    subsets: int
    subset_size: int


class _Features(nn.Module):
    """Features are at hand already: pass them through."""

    def __init__(self, dimension: int):
        super().__init__()
        self.num_features = dimension

    def forward(self, features: Tensor) -> Tensor:
        return features


def kernel_distance(
    first: Tensor, second: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> KernelDistance:
    """Kernel distance of features (n, d) and (m, d), in float64."""
    from torchmetrics.image.kid import KernelInceptionDistance

    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise MetricError(f"features must be (n, d) and (m, d), got {tuple(first.shape)} and {tuple(second.shape)}")
    size = min(subset_size, len(first), len(second))
    if size < 2:
        raise MetricError("a kernel distance needs at least 2 images on each side")
    if not bool(first.isfinite().all() and second.isfinite().all()):
        raise MetricError("features hold NaN or infinity; check the images and the feature extractor")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Metric `Kernel Inception Distance` will save all"
        )  # they are in memory anyway
        metric = KernelInceptionDistance(_Features(first.shape[1]), subsets=subsets, subset_size=size)
    metric.update(first.double(), real=True)
    metric.update(second.double(), real=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mean, spread = metric.compute()
    known = size < min(len(first), len(second))
    return KernelDistance(float(mean), float(spread) if known else None, subsets, size)
