"""Pictures of the guides, of the embedded models: `python scripts/guide_pictures.py` writes them, in two minutes.

The commands of those pages run on stand-ins for the reader's own model, which are too small to show anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import optcov
from optcov.bundle import test_images
from optcov.bundle.pictures import draw_grid, show
from optcov.canvas import new_figure, save
from optcov.data import to_8bit
from optcov.inverse import Mask, restore
from optcov.likelihood import Estimate, LikelihoodRow
from optcov.likelihood.result import Likelihoods

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
PANELS = (("fashion", "NPR-DDPM", 100), ("fashion", "UniPC", 20), ("cifar10", "UniPC", 25))
ROW = 5  # images of a class
SHOWN = ("beta", "analytic", "npr")


def samples(path: Path) -> None:
    """Two samples of each class, by the default method."""
    model = optcov.load("fashion")
    labels = torch.tensor(model.class_numbers * 2)
    drawn = model.sample(len(labels), steps=10, labels=labels, progress=False)
    draw_grid(to_8bit(drawn), path, "", columns=len(model.class_numbers))


def embedded(path: Path) -> None:
    """What the embedded models draw, a row for each class: by NPR-DDPM in many steps, and by diffusers' UniPC."""
    figure = new_figure(6.4, 4.6)
    for axes, (name, method, steps) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        model = optcov.load(name, schedule="linear")
        labels = torch.tensor(model.class_numbers).repeat_interleave(ROW)
        drawn = to_8bit(model.sample(len(labels), method=method, steps=steps, labels=labels, progress=False))
        show(axes, drawn.unflatten(0, (-1, ROW)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2))
        axes.set_title(f"{name}: {method}, {steps} steps", fontsize=8)
    save(figure, path)
    with Image.open(path) as picture:  # 256 colours take less than half the space
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def bits(path: Path) -> None:
    """Bits/dim along even and optimal times, as measured for the page of results."""
    lines = (ROOT / "measurements" / "fashion" / "bpd.jsonl").read_text(encoding="utf-8").splitlines()
    largest = max(map(json.loads, lines), key=lambda cell: cell["settings"]["images"])
    rows = [row for row in largest["result"]["rows"] if row["covariance"] in SHOWN]
    found = [_row(row["covariance"], row["kind"], row["K"], row["bits_per_dim"]) for row in rows]
    Likelihoods(tuple(found)).plot(path)


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
    pictures = {"grid": samples, "embedded-models": embedded, "bits-per-dim": bits, "restoration": restoration}
    for name, draw in pictures.items():
        draw(IMAGES / f"{name}.png")
