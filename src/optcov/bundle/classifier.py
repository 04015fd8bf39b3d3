"""Classes of images by a bundle's own bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.bundle.bundle import Bundle
from optcov.data import load
from optcov.data.tensors import as_set, fitted_to
from optcov.likelihood.classes import class_bounds
from optcov.likelihood.elbo import check_ends_at_final_time
from optcov.methods import find_method
from optcov.progress import track
from optcov.schedule import is_whole


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
    """`Bundle.class_log_probabilities`: float64 (B, classes), columns in the order of `bundle.class_numbers`."""
    for name, value, least in (("steps", steps, 2), ("batch_size", batch_size, 1)):
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} = {value!r} is not a whole number of at least {least}")
    if not is_whole(seed):
        raise ValueError(f"seed = {seed!r} is not a whole number; pass one such as 0")
    if bundle.classes is None:
        raise ValueError(f"{bundle.name} knows no classes, so that it cannot tell them apart")
    row = find_method(method or scoring_method(bundle))
    if row.covariance is None or row.eta != 1:
        raise ValueError(
            f"{row.name} has no finite variational bound; choose a method such as {scoring_method(bundle)}"
        )
    found = load(images, "test") if isinstance(images, str | Path) else as_set(images)
    data = fitted_to(bundle.as_latents(found), bundle.image_shape, bundle.name)
    process, trajectory = bundle.reverse_process(row, all_heads=False), bundle.trajectory(steps)
    check_ends_at_final_time(trajectory, bundle.schedule)
    device = next(bundle.unet.parameters(), torch.empty(0)).device
    parts, starts = [], range(0, len(data), batch_size)
    for first in track(starts, len(starts), f"{bundle.classes} classes, {steps} steps", "batches", show=progress):
        numbers = range(first, min(first + batch_size, len(data)))
        x_0 = data.x_0(torch.arange(numbers.start, numbers.stop)).to(device)
        bounds = class_bounds(process, x_0, trajectory, bundle.class_numbers, seed=seed, images=numbers)
        parts.append((-bounds).log_softmax(1).cpu())
    return torch.cat(parts)


def scoring_method(bundle: Bundle) -> str:
    """The method with the least bound among those that the bundle can do."""
    ways = {
        "NPR-DDPM": "npr" in bundle.heads,
        "SN-DDPM": "sn" in bundle.heads,
        "A-DDPM": bundle.numbers is not None,
    }
    return next((method for method, possible in ways.items() if possible), "DDPM, beta-tilde")
