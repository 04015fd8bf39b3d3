"""The losses of the trainings in measurements/training as a picture, and a run's own log as such a file.

    python scripts/training_curves.py docs/images/training-curves.png
    python scripts/training_curves.py measurements/training/NAME.jsonl RUN     adds a run, which may go on from the last

A file has the settings of each run in a line, then the mean loss of every 100 steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from optcov.canvas import OTHER, open_frame

MEASURED = Path(__file__).parent.parent / "measurements" / "training"
SHOWN = {
    "fashion": "U-Net, Fashion-MNIST",
    "flow-dit": "DiT, Fashion-MNIST",
    "cifar10": "U-Net, CIFAR-10",
}
EVERY = 100  # steps of a mean


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The settings of a run, and its mean losses."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {record["step"]: record for record in records}  # a resumed run may tell a step twice
    found = []
    for end in range(EVERY, max(by_step) + 1, EVERY):
        losses = [record["loss"] for step, record in by_step.items() if end - EVERY < step <= end]
        rate = by_step[end]["learning_rate"]
        found.append({"step": end, "loss": round(sum(losses) / len(losses), 5), "learning_rate": rate})
    return [{"run": json.loads((run / "run.json").read_text())}, *found]


def curve(name: str) -> tuple[list[float], list[float], list[float]]:
    """Epochs and losses of a file, and where its runs start; a run that goes on from another's weights follows it."""
    epochs, losses, starts, end, scale = [], [], [], 0.0, 0.0
    for line in map(json.loads, (MEASURED / f"{name}.jsonl").read_text().splitlines()):
        if "run" in line:
            starts.append(end)
            scale = line["run"]["batch_size"] / line["run"]["data"]["images"]
            continue
        end = starts[-1] + line["step"] * scale
        epochs.append(end)
        losses.append(line["loss"])
    return epochs, losses, starts


def draw(path: str) -> None:
    """All curves, smoothed over 500 steps; a dotted line where a part begins."""
    names = [name for name in SHOWN if (MEASURED / f"{name}.jsonl").exists()]
    figure = Figure(figsize=(2.9 * len(names), 3.0), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)
    panels[0][0].set_ylabel("loss")
    for axes, name in zip(panels[0], names, strict=True):
        epochs, losses, starts = curve(name)
        smooth = [sum(losses[max(0, i - 4) : i + 1]) / len(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]
        axes.plot(epochs, losses, color="0.75", linewidth=1)
        axes.plot(epochs, smooth, color=OTHER, linewidth=2)
        for start in starts[1:]:
            axes.axvline(start, color="0.4", linestyle=":", linewidth=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        low = min(smooth)
        axes.set(title=SHOWN[name], xlabel="epochs", ylim=(0.95 * low, 1.6 * low))
        open_frame(axes)
    figure.savefig(path, dpi=140)


def main(path: str, *runs: str) -> None:
    """Draw, or record."""
    if not runs:
        return draw(path)
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for run in runs for line in lines_of(Path(run)))
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
