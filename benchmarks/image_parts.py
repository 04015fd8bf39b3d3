"""Which part of the distance of images differs: FID, the part of it that the means make, KID, and power by frequency.

    python benchmarks/image_parts.py --data data/cifar10.npz --reference REFERENCE --out runs/image-parts
        [--steps 5 10] [--samples 1000] [--row ROW] [--record FILE]

All rows start from the same noise, each class in turn. Two rows are CNPR-DDPM whose noise is correlated at some noise
levels only; at the others they are NPR-DDPM. Three are of benchmarks/few_steps.py. Power is that of the images in rings
of frequencies, as a share of that of the test images. REFERENCE is a file of `optcov statistics`. Features are kept in
--out, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from few_steps import BATCH, PEERS, ROWS, default_times, drawn, in_turn, measured, path_of
from torch import Tensor

import optcov
from optcov import METHODS, ReverseProcess, Trajectory, data
from optcov.bundle import Bundle
from optcov.covariances import Spectrum
from optcov.data import ImageSet, to_8bit
from optcov.gaussian import Basis
from optcov.metrics import FeatureStatistics
from optcov.metrics.extractors import find_extractor
from optcov.metrics.sources import features_of
from optcov.schedule import Time
from optcov.solvers import BridgeNoise
from optcov.storage import read_tensors, write_tensors
from optcov.trajectory import sigma_of

RINGS = (0, 0.5, 1.5, 3, 6, 12, 24, 64)  # edges, in half waves across the image
AGAINST = ("NPR-DDPM", "DDIM")
PARTLY: dict[str, Callable[[float], bool]] = {  # noise / signal -> whether the noise is correlated
    "CNPR-DDPM above a ratio of 3": lambda sigma: sigma > 3,
    "CNPR-DDPM below a ratio of 3": lambda sigma: sigma <= 3,
}
FEW_STEPS = ("UniPC", "Bridge 2M", "Bridge 2M, last step at 0.15")
SHOWN = (*AGAINST, "CNPR-DDPM", *PARTLY, *FEW_STEPS)


def partly(bundle: Bundle, where: Callable[[float], bool]) -> ReverseProcess:
    """CNPR-DDPM with correlations at these noise levels; elsewhere all frequencies have the same power."""
    known = bundle.spectrum("npr")

    def at(t: Time) -> Tensor:
        power = known.at(t)
        return power if where(sigma_of(bundle.schedule, float(t))) else torch.ones_like(power)

    return bundle.reverse_process("CNPR-DDPM", spectrum=Spectrum(at, known.basis))


def ring_powers(images: Tensor) -> Tensor:
    """Mean square of the cosine coefficients of images (n, C, H, W) in each ring of frequencies."""
    squares = Basis().transform(images.double()).square().mean((0, 1))
    height, width = (torch.arange(size) for size in squares.shape)
    radius = (height[:, None] ** 2 + width**2).sqrt()
    return torch.stack([squares[(radius >= a) & (radius < b)].mean() for a, b in pairwise(RINGS)])


def stepwise(bundle: Bundle, name: str, K: int) -> Callable[[range], Tensor]:
    """Draws images by number, by a row of METHODS or one that is partly correlated."""
    process = partly(bundle, PARTLY[name]) if name in PARTLY else bundle.reverse_process(name, all_heads=False)
    cap = METHODS["CNPR-DDPM" if name in PARTLY else name].noise_cap
    trajectory = Trajectory.even(bundle.schedule, K)

    def draw(images: range) -> Tensor:
        options: dict[str, Any] = {"indices": images, "condition": in_turn(bundle, images), "noise_cap": cap}
        return optcov.sample(process, trajectory, (len(images), *bundle.image_shape), **options)

    return draw


def few_steps(bundle: Bundle, name: str, K: int) -> Callable[[range], Tensor]:
    """The same by a row of benchmarks/few_steps.py that needs no calibration."""
    noise = None if name in PEERS else BridgeNoise(bundle.schedule, ROWS[name].get("times", default_times)(bundle, K))
    return lambda images: drawn(bundle, name, noise, K, images)


def fill(bundle: Bundle, name: str, K: int, samples: int, out: Path) -> None:
    """Draw what a cell lacks, and keep its features and the powers of each batch."""
    path, extractor = path_of(out, name, K), find_extractor("inception")
    draw = few_steps(bundle, name, K) if name in FEW_STEPS else stepwise(bundle, name, K)
    kept = read_tensors(path)[0] if path.exists() else {"features": torch.zeros(0, 2048), "powers": torch.zeros(0, 7)}
    while len(kept["features"]) < samples:
        images = range(len(kept["features"]), min(len(kept["features"]) + BATCH, samples))
        x_0 = draw(images)
        powers = len(images) / BATCH * ring_powers(x_0)[None].float()
        new = {"features": extractor.features(ImageSet(to_8bit(x_0), None, name)), "powers": powers}
        kept = {key: torch.cat([kept[key], new[key]]) for key in kept}
        write_tensors(path, kept)


def main() -> None:
    """Draw what is missing, and print a line per row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="CIFAR-10, as optcov reads it")
    parser.add_argument("--reference", required=True, help="statistics of the training images")
    parser.add_argument("--bundle", default="cifar10")
    parser.add_argument("--out", type=Path, required=True, help="where features are kept")
    parser.add_argument("--steps", type=int, nargs="+", default=[10])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--row", action="append", help="a row alone, which is drawn and not measured")
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bundle = optcov.load(options.bundle, schedule="linear")
    for K in options.steps:
        for name in options.row or SHOWN:
            fill(bundle, name, K, options.samples, options.out)
    if options.row:
        return
    reference = features_of(options.reference, find_extractor("inception"))
    assert isinstance(reference, FeatureStatistics)
    real = ring_powers(data.load(options.data, "test").x_0())
    lines = []
    classes = len(bundle.class_numbers)
    for cell in (c for K in options.steps for c in measured(options.out, reference, K, classes, AGAINST, SHOWN)):
        powers = read_tensors(path_of(options.out, cell["row"], cell["steps"]))[0]["powers"]
        shares = powers.double().sum(0) * BATCH / options.samples / real
        del cell["replicates"]
        found = {
            "bundle": options.bundle,
            "model": bundle.digest()[:12],
            "power": [round(float(share), 4) for share in shares],
        }
        lines.append(json.dumps(cell | found))
        print(lines[-1], flush=True)
    if options.record:
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
