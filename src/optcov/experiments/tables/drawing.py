"""The distance of images that a method draws: one cell of tab:fid, in parts that an interrupted run finds again."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.bundle import Bundle, Sampler
from optcov.bundle.conditions import labels_in_rows
from optcov.data import ImageSet, to_8bit
from optcov.experiments.tables.cells import Result
from optcov.metrics import Extractor, measure_frechet, measure_kernel
from optcov.metrics.frechet import Features
from optcov.metrics.kernel import KernelSide
from optcov.storage import StorageError, read_tensors, write_tensors
from optcov.trajectory import Trajectory

SAVE_EVERY = 30.0  # seconds between saves of what is drawn


def compute_distance(
    bundle: Bundle,
    extractor: Extractor,
    reference: Features,
    kernel: KernelSide | None,
    settings: Mapping[str, Any],
    scratch: Path,
    batch_size: int,
) -> Generator[float, None, Result]:
    """Draw images, keep their features, and measure how far they are from the reference.

    kernel: the reference of the kernel distance, which is measured too; None to leave it out.
    """
    wanted, path, sampler = int(settings["samples"]), scratch.with_suffix(".safetensors"), _sampler(bundle, settings)
    parts = _parts(path)
    done, saved = sum(len(part) for part in parts["evaluations"]), time.monotonic()
    while done < wanted:
        indices = range(done, min(done + batch_size, wanted))
        drawn = sampler.draw(indices)
        parts["features"].append(extractor.features(ImageSet(to_8bit(drawn.x_0.cpu()), None, settings["method"])))
        parts["evaluations"].append(drawn.evaluations.double())
        done += len(indices)
        if time.monotonic() - saved > SAVE_EVERY and done < wanted:
            write_tensors(path, {name: torch.cat(tensors) for name, tensors in parts.items()})
            saved = time.monotonic()
        yield done / wanted
    features = _by_class(torch.cat(parts["features"]), settings, bundle)
    distance = measure_frechet(features, reference, mix=False)  # each row has noise of its own
    near = None if kernel is None else measure_kernel(features, kernel, mix=False)
    return {
        "name": extractor.distance,
        "value": distance.value,
        "standard_error": distance.standard_error,
        "limit": distance.limit,
        "replicates": [list(part) for part in distance.replicates],
        **({} if near is None else {"kernel": {"value": near.value, "standard_error": near.standard_error}}),
        "samples": wanted,
        "evaluations": float(torch.cat(parts["evaluations"]).mean()),
    }


def _by_class(features: Tensor, settings: Mapping[str, Any], bundle: Bundle) -> Tensor:
    """Rows of each class together, if classes were drawn in turn: then every group that is left out has all classes."""
    if "labels" not in settings:
        return features
    return features[torch.argsort(torch.arange(len(features)) % len(bundle.class_numbers), stable=True)]


def _sampler(bundle: Bundle, settings: Mapping[str, Any]) -> Sampler:
    times = settings["times"]
    classes = bundle.class_numbers if "labels" in settings else []
    return Sampler(
        bundle,
        settings["method"],
        settings["steps"],
        settings["seed"],
        trajectory="even" if times is None else Trajectory(times),
        tolerance=settings["tolerance"] or 0.05,
        condition=labels_in_rows(classes, settings["samples"]),
    )


def _parts(path: Path) -> dict[str, list[Tensor]]:
    """What an interrupted cell has drawn already."""
    if not path.exists():
        return {"features": [], "evaluations": []}
    try:
        tensors = read_tensors(path)[0]
    except StorageError as error:
        raise StorageError(f"{error}; remove it to draw its images again") from error
    if set(tensors) != {"features", "evaluations"} or len(tensors["features"]) != len(tensors["evaluations"]):
        raise StorageError(f"{path} holds no parts of a distance; remove it to draw its images again")
    return {name: [tensor] for name, tensor in tensors.items()}
