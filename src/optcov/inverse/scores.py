"""Scores of a restoration: PSNR of its mean, coverage of its intervals, CRPS of its samples."""

from __future__ import annotations

import torch
from torch import Tensor

from optcov.schedule import check_number


def psnr(mean: Tensor, truth: Tensor, width: float = 2.0) -> Tensor:
    """Peak signal-to-noise ratio in dB per image, (B,). width is the width of the data range; images are (B, *D)."""
    if not check_number("width", width) > 0:
        raise ValueError(f"width = {width} is not that of a range of images; pass one above 0, such as 2")
    _check(mean, truth)
    error = (mean.double() - truth.double()).square().flatten(1).mean(1)
    return 10 * torch.log10(width**2 / error.clamp(min=1e-20))


def coverage(samples: Tensor, truth: Tensor, level: float) -> Tensor:
    """The share of true pixels inside the central interval of this level, (B, *D); samples (B, S, *D), truth (B, *D).

    If the truth is distributed like a sample, its rank among the samples is uniform over S + 1 places. A place may lie
    partly inside the level, and then counts by that part. So the expected coverage equals the level for every S. If the
    truth equals some samples, it gets any of their ranks with equal probability.
    """
    _check_samples(samples, truth, 1)
    if not 0 < check_number("level", level) < 1:
        raise ValueError(f"level = {level} is not a share of the truth; pass a number between 0 and 1")
    places = samples.shape[1] + 1
    lowest = (samples < truth.unsqueeze(1)).sum(1) / places
    highest = ((samples <= truth.unsqueeze(1)).sum(1) + 1) / places
    inside = highest.clamp(max=(1 + level) / 2) - lowest.clamp(min=(1 - level) / 2)
    return inside.clamp(min=0) / (highest - lowest)


def crps(samples: Tensor, truth: Tensor) -> Tensor:
    """Continuous ranked probability score per pixel, (B, *D): E|X - x| - E|X - X'| / 2. Less is better."""
    _check_samples(samples, truth, 2)
    count = samples.shape[1]
    order, _ = samples.double().sort(1)
    weights = 2 * torch.arange(count, dtype=torch.float64) - (count - 1)  # of the sorted samples in sum |X_i - X_j|
    spread = (order * weights.reshape(1, -1, *[1] * (samples.ndim - 2))).sum(1) / (count * (count - 1))
    return (samples.double() - truth.double().unsqueeze(1)).abs().mean(1) - spread


def _check_samples(samples: Tensor, truth: Tensor, least: int) -> None:
    if not isinstance(samples, Tensor) or samples.ndim < 2 or samples.shape[1] < least:
        found = f"tensor of shape {tuple(samples.shape)}" if isinstance(samples, Tensor) else type(samples).__name__
        raise ValueError(
            f"the samples are a {found}; this score needs a tensor (B, S, *D) with an S of at least {least}"
        )
    _check(samples[:, 0], truth)
    _check_finite(samples)


def _check(found: Tensor, truth: Tensor) -> None:
    for name, images in (("images", found), ("the truth", truth)):
        if not isinstance(images, Tensor) or not images.ndim:
            raise ValueError(f"{name} = {images!r:.80} is not a tensor (B, *D); convert it by torch.as_tensor")
        _check_finite(images)
    if found.shape != truth.shape:
        raise ValueError(f"images have shape {tuple(found.shape)}, but the truth has {tuple(truth.shape)}")


def _check_finite(images: Tensor) -> None:
    if not bool(images.isfinite().all()):
        raise ValueError("samples or truth hold NaN or infinity, which have no score; restore them again")
