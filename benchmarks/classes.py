"""What a class tells a class-conditional model: its bound with and without, its covariances, and its classifier.

    python benchmarks/classes.py BUNDLE DATA --images 200 --steps 10 --seeds 4 --record FILE.jsonl

On test images of DATA: bits/dim (or nats per dimension, without a data range) of NPR given the right class less that
without a class, NPR less the analytic variance, and the accuracy of the classes that the bound tells apart, by the
number of noises that the bound is averaged over. Differences are paired by image and noise. Heads' calibration by
decile is what `optcov fit` measured on its held-out images.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import optcov
from optcov.bundle import Bundle
from optcov.data import load
from optcov.likelihood.classes import Classification

BATCH = 50


@torch.no_grad()
def bits(bundle: Bundle, method: str, x_0: Tensor, labels: Tensor | None, steps: int) -> Tensor:
    """The bound of each image, (n,)."""
    process = bundle.reverse_process(method, all_heads=False)
    trajectory = bundle.trajectory(steps)
    parts = []
    for index in torch.arange(len(x_0)).split(BATCH):
        told = None if labels is None else {"class_labels": labels[index]}
        terms = optcov.elbo(process, x_0[index], trajectory, condition=told, images=index.tolist())
        parts.append(terms.bits_per_dim())
    return torch.cat(parts)


def paired(a: Tensor, b: Tensor) -> dict[str, float]:
    """Mean of a - b, its standard error, and their ratio."""
    difference = a - b
    error = float(difference.std() / len(difference) ** 0.5)
    return {"difference": float(difference.mean()), "standard_error": error, "z": float(difference.mean()) / error}


def classified(bundle: Bundle, method: str, x_0: Tensor, labels: Tensor, steps: int, seeds: int) -> dict[str, Any]:
    """How well the mean bound of 1, 2, 4, ... noises tells the classes apart, and which ones it confuses."""
    repeats = torch.stack(
        [bundle.class_log_probabilities(x_0, steps=steps, method=method, seed=seed) for seed in range(seeds)]
    )
    numbers = [2**power for power in range(seeds.bit_length()) if 2**power <= seeds]
    results = {number: Classification.of(repeats[:number], labels) for number in numbers}
    last = results[numbers[-1]]
    wrong = Counter(
        tuple(sorted(pair)) for pair in zip(labels.tolist(), last.predicted.tolist(), strict=True) if pair[0] != pair[1]
    )
    return {
        "accuracy": {
            str(number): {"mean": found.accuracy.mean, "standard_error": found.accuracy.standard_error}
            for number, found in results.items()
        },
        "accuracy of each noise": [Classification.of(one, labels).accuracy.mean for one in repeats],
        "calibration error of the classes": last.calibration_error,
        "images that tie": None if last.ties is None else int(last.ties.sum()),
        "pairs confused most": [[*pair, times] for pair, times in wrong.most_common(5)],
        "images confused": sum(wrong.values()),
    }


def measure(bundle: Bundle, data: str, count: int, steps: int, seeds: int) -> dict[str, Any]:
    """Everything, by name."""
    test = load(data, "test")
    assert test.labels is not None
    index = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:count]
    x_0, labels = test.x_0(index), torch.as_tensor(test.labels)[index].long()
    told, untold = (bits(bundle, "NPR-DDPM", x_0, known, steps) for known in (labels, None))
    analytic = bits(bundle, "A-DDPM", x_0, labels, steps)
    calibration = bundle.provenance.get("calibration", {})
    return {
        "images": count,
        "steps": steps,
        "NPR given the class": float(told.mean()),
        "NPR without a class": float(untold.mean()),
        "A given the class": float(analytic.mean()),
        "class less no class": paired(told, untold),
        "NPR less A": paired(told, analytic),
        "classes by NPR": classified(bundle, "NPR-DDPM", x_0, labels, steps, seeds),
        "classes by A": classified(bundle, "A-DDPM", x_0, labels, steps, seeds),
        "calibration by decile": {name: entry["ratio"] for name, entry in calibration.items()},
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=4, help="noises of the classifier's bound")
    parser.add_argument("--record", type=Path, help="write the result to this file, a line of JSON")
    options = parser.parse_args()
    result = measure(optcov.load(options.bundle), options.data, options.images, options.steps, options.seeds)
    print(json.dumps(result, indent=2))
    if options.record is not None:
        options.record.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
