"""bits/dim of every covariance of a bundle, paired by image and noise, and the variances that had to be clamped.

    python benchmarks/covariances.py BUNDLE DATA --images 256 --steps 10,25 --record FILE.jsonl [--beside OTHER]

DATA: test images that no fit has seen. A network of classes is told theirs. --beside: another bundle of the same
network, whose NPR and SN are compared with this one's: what its heads gain.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import optcov
from optcov import ForwardProcess, ReverseProcess, Trajectory, cost_table
from optcov.bundle import Bundle
from optcov.covariances import Covariance
from optcov.data import ImageSet, load
from optcov.likelihood import CostTable

LEFT_OUT = ("beta_tilde", "range")  # far worse than all others


def scored(bundle: Bundle) -> list[str]:
    """What the bundle has everything for, and a bound."""
    kinds = {name: kind for name, kind in Covariance.registry.items() if name not in LEFT_OUT and kind.has_posterior}
    spectra = () if bundle.spectra is None else bundle.spectra.names
    numbers = {} if bundle.numbers is None else bundle.numbers.tensors()
    return [
        name
        for name, kind in kinds.items()
        if (kind.head is None or kind.head in bundle.heads)
        and (kind.spectrum is None or kind.spectrum in spectra)
        and (kind.number is None or kind.number in numbers)
        and kind.__module__.startswith("optcov.")
    ]


def priced(bundle: Bundle, images: ImageSet, trajectory: Trajectory, kinds: list[str]) -> CostTable:
    """The bound of each image apart."""
    process = ReverseProcess(bundle.network, ForwardProcess(bundle.schedule), "beta_tilde", bundle.data_range)
    labels = images.labels if bundle.classes else None
    return cost_table(
        process,
        images.x_0(torch.arange(len(images))),
        kinds,
        times=trajectory.times,
        last_variances=["paper"],
        groups=len(images),
        mean_square_noise=bundle.per_time("mean_square_noise"),
        mean_square_residual=bundle.per_time("mean_square_residual"),
        spectra={} if bundle.spectra is None else {name: bundle.spectrum(name) for name in bundle.spectra.names},
        condition=None if labels is None else {"class_labels": torch.as_tensor(labels).long()},
    )


def paired(first: Tensor, second: Tensor) -> dict[str, float]:
    """Mean of the difference, its standard error, and their ratio."""
    difference = (first - second).double()
    mean, error = float(difference.mean()), float(difference.std()) / len(difference) ** 0.5
    return {"mean": round(mean, 4), "standard_error": round(error, 4), "z": round(mean / error, 1) if error else 0.0}


def measure(bundle: Bundle, other: Bundle | None, images: ImageSet, K: int) -> dict[str, Any]:
    """All of it for one number of steps."""
    kinds, trajectory = scored(bundle), Trajectory.even(bundle.schedule, K)
    if not {"npr", "analytic"} <= set(kinds):
        raise SystemExit(f"{bundle.name} lacks the head npr or its numbers per time; fit them first")
    if other is not None and other.fingerprint != bundle.fingerprint:
        raise SystemExit(f"{other.name} has another network than {bundle.name}; compare heads of one network")
    table = priced(bundle, images, trajectory, kinds)
    bits, clamped = {name: table.group_bits_per_dim(name, trajectory) for name in kinds}, table.clamp_rates()
    found: dict[str, Any] = {
        "bundle": bundle.name,
        "model": bundle.on_its_own_schedule().digest()[:12],
        "steps": K,
        "images": len(images),
        "bits/dim": {
            name: {"mean": round(float(b.mean()), 4), "standard_error": round(float(b.std()) / len(b) ** 0.5, 4)}
            for name, b in bits.items()
        },
        "less npr": {name: paired(b, bits["npr"]) for name, b in bits.items() if name != "npr"},
        "less analytic": {name: paired(b, bits["analytic"]) for name, b in bits.items() if name != "analytic"},
        "clamped below and above": {name: clamped[name] for name in kinds if name in clamped},
    }
    if other is not None:
        common = [name for name in ("npr", "sn") if name in other.heads and name in kinds]
        beside = priced(other, images, trajectory, common)
        found["less that of the other bundle"] = {
            name: paired(bits[name], beside.group_bits_per_dim(name, trajectory)) for name in common
        }
    return found


def main() -> None:
    """Read the arguments, and write a line of JSON per number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", default="10,25")
    parser.add_argument("--schedule", default="linear")
    parser.add_argument("--beside")
    parser.add_argument("--record", type=Path, required=True)
    given = parser.parse_args()
    bundle = optcov.load(given.bundle, schedule=given.schedule)
    other = None if given.beside is None else optcov.load(given.beside, schedule=given.schedule)
    images = load(given.data, "test").select(slice(given.first, given.first + given.images))
    given.record.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for K in given.steps.split(","):
        lines.append(json.dumps(measure(bundle, other, images, int(K))))
        given.record.write_text("\n".join(lines) + "\n")
        print(lines[-1], flush=True)


if __name__ == "__main__":
    main()
