"""Pictures of the guides, of the embedded model `fashion`: `python scripts/guide_pictures.py` writes them, in a minute.

The commands of those pages run on stand-ins for the reader's own model, which are too small to show anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import optcov
from optcov.bundle import test_images
from optcov.bundle.pictures import draw_grid
from optcov.data import to_8bit
from optcov.inverse import Mask, restore
from optcov.likelihood import Estimate, LikelihoodRow
from optcov.likelihood.plots import plot_bits

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
SHOWN = ("beta", "analytic", "npr")


def samples(path: Path) -> None:
    """Two samples of each class, by the default method."""
    model = optcov.load("fashion")
    labels = torch.tensor(model.class_numbers * 2)
    drawn = model.sample(len(labels), steps=10, labels=labels, progress=False)
    draw_grid(to_8bit(drawn), path, "", columns=len(model.class_numbers))


def bits(path: Path) -> None:
    """Bits/dim along even and optimal times, as measured for the page of results."""
    lines = (ROOT / "measurements" / "fashion" / "bpd.jsonl").read_text(encoding="utf-8").splitlines()
    largest = max(map(json.loads, lines), key=lambda cell: cell["settings"]["images"])
    rows = [row for row in largest["result"]["rows"] if row["covariance"] in SHOWN]
    plot_bits([_row(row["covariance"], row["kind"], row["K"], row["bits_per_dim"]) for row in rows], path)


def _row(covariance: str, kind: str, K: int, bits: Mapping[str, Any]) -> LikelihoodRow:
    return LikelihoodRow(covariance, kind, K, (), Estimate(**bits), None, ())


def restoration(path: Path) -> None:
    """A bag with a hidden box."""
    model, truth = optcov.load("fashion"), test_images("fashion")[30]
    mask = Mask.box((1, 28, 28), top=7, left=7, height=14, width=14)
    noise = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = mask.apply(truth[None] + 0.05 * noise)[0]
    restore(model, y, mask, noise_std=0.05, steps=50, samples=16).plot(str(path), truth=truth, shown=3)


if __name__ == "__main__":
    for name, draw in {"grid": samples, "bits-per-dim": bits, "restoration": restoration}.items():
        draw(IMAGES / f"{name}.png")
