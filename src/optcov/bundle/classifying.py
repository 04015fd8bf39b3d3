"""The class of an image, from the bound for each class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optcov.bundle.bundle import Bundle
from optcov.bundle.scoring import covariance_of
from optcov.likelihood.classes import class_bounds
from optcov.likelihood.elbo import check_ends_at_final_time
from optcov.progress import track
from optcov.schedule import check_whole


def class_log_probabilities(
    bundle: Bundle,
    images: Any,
    steps: int = 10,
    *,
    method: str | None = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: bool = True,
) -> Tensor:
    """`Bundle.class_log_probabilities`: float64 (B, classes), with columns in the order of `bundle.class_numbers`."""
    for name, value, least in (("steps", steps, 2), ("batch_size", batch_size, 1), ("seed", seed, None)):
        check_whole(name, value, least)
    if bundle.classes is None:
        raise ValueError(f"{bundle.name} knows no classes, so that it cannot tell them apart")
    method = method or _classifier(bundle)
    covariance_of(method)  # refuses one without a bound
    data = bundle.data_of(images, "test")
    process, trajectory = bundle.reverse_process(method, all_heads=False), bundle.trajectory(steps)
    check_ends_at_final_time(trajectory, bundle.schedule)
    parts, starts = [], range(0, len(data), batch_size)
    for first in track(starts, len(starts), f"{bundle.classes} classes, {steps} steps", "batches", show=progress):
        numbers = range(first, min(first + batch_size, len(data)))
        x_0 = data.x_0(torch.arange(numbers.start, numbers.stop)).to(bundle.device)
        bounds = class_bounds(process, x_0, trajectory, bundle.class_numbers, seed=seed, images=numbers)
        parts.append((-bounds).log_softmax(1).cpu())
    return torch.cat(parts)


def _classifier(bundle: Bundle) -> str:
    """The method whose bound tells classes apart best, among those that the bundle can do: not the tightest one."""
    ways = {"A-DDPM": bundle.numbers is not None, "NPR-DDPM": "npr" in bundle.heads, "SN-DDPM": "sn" in bundle.heads}
    return next((method for method, possible in ways.items() if possible), "DDPM, beta-tilde")
