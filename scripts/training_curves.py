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

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

MEASURED = Path(__file__).parent.parent / "measurements" / "training"
SHOWN = {
    "fashion": "U-Net of velocities on Fashion-MNIST",
    "flow-dit": "DiT by flow matching on Fashion-MNIST",
    "cifar10": "U-Net of velocities on CIFAR-10",
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


def curve(name: str) -> tuple[list[float], list[float]]:
    """Epochs and losses of a file; runs that go on from each other's weights follow each other."""
    epochs, losses, start, end, scale = [], [], 0.0, 0.0, 0.0
    for line in map(json.loads, (MEASURED / f"{name}.jsonl").read_text().splitlines()):
        if "run" in line:
            start, scale = end, line["run"]["batch_size"] / line["run"]["data"]["images"]
            continue
        end = start + line["step"] * scale
        epochs.append(end)
        losses.append(line["loss"])
    return epochs, losses


def draw(path: str) -> None:
    """All curves, smoothed over 500 steps."""
    names = [name for name in SHOWN if (MEASURED / f"{name}.jsonl").exists()]
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(4.2 * len(names), 3.4), layout="constrained", squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        epochs, losses = curve(name)
        smooth = [sum(losses[max(0, i - 4) : i + 1]) / len(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]
        axes.plot(epochs, losses, color="0.8", linewidth=1)
        axes.plot(epochs, smooth, color="tab:blue", linewidth=2)
        low = min(smooth)
        axes.set(title=SHOWN[name], xlabel="epochs", ylabel="loss", ylim=(0.95 * low, 1.6 * low))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main(path: str, *runs: str) -> None:
    """Draw, or record."""
    if not runs:
        return draw(path)
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for run in runs for line in lines_of(Path(run)))
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
