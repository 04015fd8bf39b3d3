"""The plot of docs/covariances.md: bits/dim of each covariance less NPR's, on both embedded models.

python scripts/covariances_plot.py docs/images/covariances.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

MEASURED = Path(__file__).parent.parent / "measurements" / "covariances"
SHOWN = {
    "analytic": "one variance per timestep (A)",
    "spectral": "spectral, no head",
    "sn": "SN",
    "npr": "NPR",
    "sn_correlated": "correlated SN",
    "npr_correlated": "correlated NPR",
}
COLOURS = {10: "tab:blue", 25: "tab:orange"}


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
        axes.barh(places, [gap["mean"] for gap in gaps], 0.36, xerr=errors, color=COLOURS[K], label=f"{K} steps")
    axes.axvline(0, color="0.2", linewidth=1)
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.set(title=model, xlabel="bits/dim minus those of NPR (left is better)")
    axes.spines[["top", "right"]].set_visible(False)


def main(path: str) -> None:
    """Draw both models."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, "fashion")
    draw(right, "cifar10")
    left.invert_yaxis()  # and so that of the other, which shares it
    left.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", help="the PNG file to write")
    main(parser.parse_args().picture)
