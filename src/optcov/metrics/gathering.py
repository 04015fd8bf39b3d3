"""Statistics of many images, gathered once and kept. An interrupted run resumes.

A progress file lies beside the file to write. It holds what was gathered so far: the statistics of the first images, in
float64, and the kept rows. It is replaced completely or not at all, so a killed run loses only what came after it.
Batches end at the same images in every run, so a resumed run gathers the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov import storage
from optcov.data import ImageSet
from optcov.identity import Identity, check_unchanged, images_identity, known_by
from optcov.metrics.extractors import Extractor
from optcov.metrics.statistics import FeatureStatistics, MetricError

BATCH = 100  # images that are merged at once
KEEP_EVERY = 10  # batches
ROWS = 10_000  # images whose features are kept for the kernel distance


@final
@dataclass(frozen=True)
class Gathered:
    """The state of a run."""

    done: int
    total: int


def kept_rows(total: int, rows: int) -> Tensor:
    """Numbers of the images whose features are kept: a random choice that depends on the two counts alone."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:rows].sort().values


def progress_file(path: Path) -> Path:
    """The path of the progress file that belongs to a file."""
    return path.with_name(f"{path.name}.progress.safetensors")


def check_place(images: ImageSet, extractor: Extractor, path: Path, rows: int = ROWS) -> bool:
    """Whether the file exists and holds the statistics of these images. Other statistics are refused."""
    if not path.exists():
        storage.require_writable(path)
        return False
    there = FeatureStatistics.load(path)
    before: dict[str, Any] = {} if there.images is None else {"images": known_by(there.images, there.count)}
    before |= {"features": there.features, "rows": 0 if there.rows is None else len(there.rows)}
    now = {"images": images_identity(images), "features": extractor.identity, "rows": min(rows, len(images))}
    check_unchanged(before, now, path, MetricError, remedy="remove it, or choose another file")
    return True


def gather_statistics(
    images: ImageSet,
    extractor: Extractor,
    path: Path,
    *,
    rows: int = ROWS,
    batch: int = BATCH,
    keep_every: int = KEEP_EVERY,
    packed: bool = False,
) -> Iterator[Gathered]:
    """Write mean and covariance of the features of all images to a .npz file, with some of the features.

    packed: as in `FeatureStatistics.save`.

    Yields after each batch. The same call resumes after an interruption. If the file exists already, it ends at once.
    """
    if check_place(images, extractor, path, rows):
        return
    identity = {"images": images_identity(images), "features": extractor.identity, "rows": rows, "batch": batch}
    with storage.claim(path.with_name(f".{path.name}.lock")) as held:
        if not held:
            raise MetricError(f"{path} is being gathered by another process; wait for it, or choose another file")
        storage.remove_leftovers(path.parent, (f".{path.name}.*.part", f".{progress_file(path).name}.*.part"))
        yield from _gather(images, extractor, path, identity, keep_every, packed)


def _gather(
    images: ImageSet, extractor: Extractor, path: Path, identity: Identity, keep_every: int, packed: bool
) -> Iterator[Gathered]:
    chosen = kept_rows(len(images), int(identity["rows"]))
    batch, so_far = int(identity["batch"]), _resume(path, identity)
    done = 0 if so_far is None else so_far.count or 0
    if so_far is not None:
        yield Gathered(done, len(images))
    for number, start in enumerate(range(done, len(images), batch), 1):
        features = extractor.features(images.select(slice(start, start + batch)))
        mine = chosen[(chosen >= start) & (chosen < start + batch)] - start
        part = replace(FeatureStatistics.of(features), rows=features[mine].half())
        so_far = part if so_far is None else _join(so_far, part)
        if number % keep_every == 0:
            _keep(path, so_far, identity)
        yield Gathered(min(start + batch, len(images)), len(images))
    assert so_far is not None  # a set of images has one at least
    replace(so_far, features=extractor.identity, images=images.checksum).save(path, packed)
    progress_file(path).unlink(missing_ok=True)


def _join(first: FeatureStatistics, second: FeatureStatistics) -> FeatureStatistics:
    assert first.rows is not None
    assert second.rows is not None
    return replace(first.merge(second), rows=torch.cat([first.rows, second.rows]))


def _keep(path: Path, so_far: FeatureStatistics, identity: Identity) -> None:
    assert so_far.rows is not None
    tensors = {"mean": so_far.mean, "covariance": so_far.covariance, "rows": so_far.rows}
    metadata = {"identity": json.dumps(identity), "count": str(so_far.count)}
    storage.write_tensors(progress_file(path), tensors, metadata)


def _resume(path: Path, identity: Identity) -> FeatureStatistics | None:
    """What an interrupted run left; refused if it was of other images or features."""
    place = progress_file(path)
    if not place.exists():
        return None
    tensors, metadata = storage.read_tensors(place)
    try:
        before, count = json.loads(metadata["identity"]), int(metadata["count"])
        so_far = FeatureStatistics(tensors["mean"], tensors["covariance"], count, rows=tensors["rows"])
        if not isinstance(before, dict):
            raise ValueError("its identity is no mapping")
    except (KeyError, ValueError) as error:
        raise MetricError(f"{place} is not what an interrupted run keeps; remove it to begin again") from error
    check_unchanged(before, identity, place, MetricError, remedy="undo that to go on, or remove the file")
    return so_far
