"""The picture on the first screen: bits/dim by the number of steps, and the predicted error beside the true one.

    python scripts/first_screen.py docs/images/first-screen.png

The curves are the measured cells of `optcov table bpd`; the images are test images that the embedded model never saw.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot

import optcov
from optcov.bundle import test_images
from optcov.canvas import colour_of, open_frame

ROOT = Path(__file__).parent.parent
CELLS = ROOT / "measurements" / "fashion" / "bpd.jsonl"
LABELS = {
    "beta": "DDPM, beta",
    "analytic": "A-DDPM: one variance per timestep",
    "npr": "NPR-DDPM: one variance per pixel",
}
NOISE = 0.25  # of the VP SDE's times: about as much noise as image, 0.69 of the one beside 0.72 of the other
SHOWN = (1, 5, 18, 22)  # a pullover, trousers, a bag, a shoe


def curves() -> dict[str, list[tuple[int, float, float]]]:
    """Steps, bits/dim and standard error along even times on the linear schedule, by covariance."""
    cells = [json.loads(line) for line in CELLS.read_text().splitlines()]
    linear = [cell for cell in cells if cell["settings"]["schedule_name"] == "linear"]
    cell = max(linear, key=lambda cell: cell["settings"]["images"])
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in cell["result"]["rows"]:
        if row["kind"] == "ET" and row["covariance"] in LABELS:
            bits = row["bits_per_dim"]
            found.setdefault(row["covariance"], []).append((row["K"], bits["mean"], bits["standard_error"]))
    return {name: sorted(found[name]) for name in LABELS}


def draw(axes: Any) -> None:
    """The curves."""
    for name, points in curves().items():
        steps, bits, errors = zip(*points, strict=True)
        axes.errorbar(steps, bits, errors, label=LABELS[name], color=colour_of(name), marker="o", linewidth=2)
    axes.set_xscale("log")
    axes.set_xticks(steps, [str(K) for K in steps])
    axes.minorticks_off()
    axes.set_xlabel("steps")
    axes.set_ylabel("bits/dim (lower is better)")
    axes.set_title("Likelihood of one network")
    axes.legend(frameon=False)
    open_frame(axes)


def panels() -> list[tuple[str, torch.Tensor, str]]:
    """Title, images (n, H, W) and colour map of each row."""
    bundle, images = optcov.load("fashion"), test_images("fashion")[list(SHOWN)]
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    x_t = optcov.ForwardProcess(bundle.schedule).diffuse(images, NOISE, noise)
    known = bundle.posterior(x_t, NOISE)
    error = (images - known.mean).abs()
    return [
        ("noisy\nimage", x_t[:, 0], "gray"),
        ("denoised", known.mean[:, 0], "gray"),
        ("predicted\nerror", known.variance.sqrt()[:, 0], "magma"),
        ("true\nerror", error[:, 0], "magma"),
    ]


def main(path: str) -> None:
    """Draw both halves."""
    figure = pyplot.figure(figsize=(8.6, 3.9), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    draw(left.subplots())
    rows = panels()
    grid = right.subplots(len(SHOWN), len(rows))
    for column, (title, values, colours) in enumerate(rows):
        high = 1.0 if colours == "gray" else 0.6
        for row in range(len(SHOWN)):
            axes = grid[row][column]
            axes.imshow(values[row], cmap=colours, vmin=-1.0 if colours == "gray" else 0.0, vmax=high)
            axes.set_axis_off()
        grid[0][column].set_title(title, fontsize=11)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", help="the PNG file to write")
    main(parser.parse_args().picture)
