"""The plot of docs/covariances.md: bits/dim of each covariance less NPR's, on both embedded models.

python scripts/covariances_plot.py docs/images/covariances.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from optcov.canvas import OTHER, colour_of, open_frame

MEASURED = Path(__file__).parent.parent / "measurements" / "covariances"
SHOWN = {
    "analytic": "one variance per timestep (A)",
    "spectral": "spectral, no head",
    "sn": "SN",
    "npr": "NPR",
    "sn_correlated": "correlated SN",
    "npr_correlated": "correlated NPR",
}
SHADES = {10: 1.0, 25: 0.45}  # how opaque the bars of each number of steps are


def lines(model: str) -> dict[int, dict[str, Any]]:
    """What was measured of a model, by the number of steps."""
    found = [json.loads(line) for line in (MEASURED / f"{model}.jsonl").read_text().splitlines()]
    return {line["steps"]: line for line in found}


def draw(axes: Any, model: str) -> None:
    """One model: a pair of bars for each covariance, with two standard errors."""
    for number, (K, line) in enumerate(sorted(lines(model).items())):
        gaps = [line["less npr"].get(name, {"mean": 0.0, "standard_error": 0.0}) for name in SHOWN]
        places = [row + 0.38 * (number - 0.5) for row in range(len(SHOWN))]
        errors = [2 * gap["standard_error"] for gap in gaps]
        colours = [(colour_of(name), SHADES[K]) for name in SHOWN]
        axes.barh(places, [gap["mean"] for gap in gaps], 0.36, xerr=errors, color=colours)
    axes.axvline(0, color="0.2", linewidth=1)
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.set(title=model, xlabel="bits/dim minus NPR's (left is better)")
    open_frame(axes)


def main(path: str) -> None:
    """Draw both models."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, "fashion")
    draw(right, "cifar10")
    left.invert_yaxis()  # and so that of the other, which shares it
    key = [Patch(color=(OTHER, shade), label=f"{K} steps") for K, shade in SHADES.items()]
    left.legend(handles=key, frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", help="the PNG file to write")
    main(parser.parse_args().picture)
