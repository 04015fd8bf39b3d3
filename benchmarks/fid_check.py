"""Is our FID the usual one? CIFAR-10's test images against its training images, which is published as about 3.15.

    optcov statistics data/cifar10#train train.npz
    optcov statistics data/cifar10#test test.npz --rows 10000
    python benchmarks/fid_check.py train.npz test.npz

Also the distance of fewer test images, to see how far the value and its limit of many samples can be trusted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from optcov import storage
from optcov.metrics import FeatureStatistics, measure_frechet, merge_all
from optcov.metrics.frechet import frechet_distance

LINES = Path(__file__).resolve().parents[1] / "measurements" / "fid" / "train-against-test.jsonl"
FEWER = (1000, 2000, 5000, 10_000)


def main(train: str, *tests: str) -> None:
    """Measure, and write measurements/fid/train-against-test.jsonl; the test images may come in several files."""
    reference, parts = FeatureStatistics.load(Path(train)), [FeatureStatistics.load(Path(name)) for name in tests]
    whole, rows = merge_all(parts), torch.cat([part.rows for part in parts if part.rows is not None]).double()
    found = {
        "train_images": reference.count,
        "test_images": whole.count,
        "FID": frechet_distance(whole, reference),
        "fewer": [{"images": n, **_measured(rows[:n], reference)} for n in FEWER if n <= len(rows)],
    }
    storage.write_bytes(LINES, (json.dumps(found) + "\n").encode())
    print(json.dumps(found, indent=1))


def _measured(rows: torch.Tensor, reference: FeatureStatistics) -> dict[str, float | None]:
    distance = measure_frechet(rows, reference)
    return {"value": distance.value, "limit": distance.limit, "standard_error": distance.standard_error}


if __name__ == "__main__":
    main(*sys.argv[1:])
