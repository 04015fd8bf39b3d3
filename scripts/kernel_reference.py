"""The reference of FID and KID: the kept statistics of CIFAR-10's training images, and features of 10,000 of them.

    python scripts/kernel_reference.py data/cifar10 out/cifar10/reference.npz

`optcov statistics` makes the same file in five times the work. A stopped run goes on, and several runs, one per core,
share the work.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from optcov import storage
from optcov.data import load
from optcov.metrics import FeatureStatistics
from optcov.metrics.extractors import find_extractor
from optcov.metrics.gathering import ROWS, kept_rows

KEPT = Path(__file__).resolve().parents[1] / "measurements" / "fid" / "cifar10-train.npz"
PART = 250  # images
PIXELS = "704cc6b155af3a7bc03373ee84c1baaa1037a914888e7e29c3bdda39d7dbcf0d"  # checksum of CIFAR-10's training images


def main(data: str, out: str) -> None:
    """Gather what is missing; whoever ends the last part writes the file."""
    images, kept, target = load(data, "train"), FeatureStatistics.load(KEPT), Path(out)
    if images.checksum != PIXELS:
        raise SystemExit(f"the {len(images)} training images of {data} are not those of CIFAR-10")
    if target.exists():
        return
    extractor, places = find_extractor("inception"), []
    work = target.with_name(f"{target.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    for number, chosen in enumerate(kept_rows(len(images), ROWS).split(PART)):
        places.append(work / f"{number:03d}.safetensors")
        with storage.claim(work / f".{number:03d}.lock") as held:
            if held and not places[-1].exists():
                storage.write_tensors(places[-1], {"rows": extractor.features(images.select(chosen)).half()})
    if all(place.exists() for place in places):
        rows = torch.cat([storage.read_tensors(place)[0]["rows"] for place in places])
        replace(kept, rows=rows).save(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
