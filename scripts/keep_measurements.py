"""Put what scripts/measure_cifar10.sh measured in the place of the lines of an earlier network.

    python scripts/keep_measurements.py out/cifar10

Then run these, which write and draw what docs show:

    python scripts/results_page.py
    python scripts/covariances_plot.py docs/images/covariances.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).resolve().parents[1] / "measurements"
WHOLE = {  # file in OUT -> file in measurements, whose lines are all of this model
    "tables/bpd": "cifar10/bpd",
    "tables/fid": "cifar10/fid",
    "tables/peers": "cifar10/peers",
    "covariances": "covariances/cifar10",
    "covariances-apart": "covariances/cifar10-apart",
    "sn-forms": "sn-forms/cifar10",
    "few-steps-fid": "causes/few-steps-fid",
    "image-parts": "causes/image-parts",
    "restoration": "restoration/cifar10",
    "restoration-jacobian": "causes/restoration-jacobian",
}
SHARED = {"ocm-trace": "causes/ocm-trace", "correlated-parts": "causes/correlated-parts"}  # with lines of other models
GAIN = "npr_correlated less npr"


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(name: str, lines: list[dict[str, Any]]) -> None:
    """Replace a file of measurements."""
    (MEASURED / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def gains(found: list[dict[str, Any]], epochs: float) -> list[dict[str, Any]]:
    """What correlations gain after so many epochs, by number of steps; see measurements/causes/correlated-training."""
    return [
        {
            "epochs": round(epochs),
            **{name: line[name] for name in ("bundle", "model", "steps", "images")},
            "npr": line["bits/dim"]["npr"],
            GAIN: line["less npr"]["npr_correlated"],
        }
        for line in found
    ]


def epochs_of(training: list[dict[str, Any]]) -> float:
    """How often the images were seen, over all runs of a record of a training."""
    total, share = 0.0, 0.0
    for line, following in zip(training, [*training[1:], {"run": None}], strict=True):
        if "run" in line:
            share = line["run"]["batch_size"] / line["run"]["data"]["images"]
        elif "run" in following:  # the last line of a run
            total += line["step"] * share
    return total


def main(out: Path) -> None:
    """Keep all that is there."""
    for source, target in WHOLE.items():
        if (out / f"{source}.jsonl").exists():
            write(target, read(out / f"{source}.jsonl"))
    for source, target in SHARED.items():
        if (out / f"{source}.jsonl").exists():
            others = [line for line in read(MEASURED / f"{target}.jsonl") if line["bundle"] != "cifar10"]
            write(target, [*others, *read(out / f"{source}.jsonl")])
    if (out / "covariances.jsonl").exists():
        epochs = epochs_of(read(MEASURED / "training" / "cifar10.jsonl"))
        known = [
            line for line in read(MEASURED / "causes" / "correlated-training.jsonl") if line["epochs"] < epochs - 1
        ]
        write("causes/correlated-training", [*known, *gains(read(out / "covariances.jsonl"), epochs)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
