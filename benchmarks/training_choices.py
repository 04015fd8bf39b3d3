"""Ways to train the embedded model, at equal time: the bound and the loss of each after the same time of one core.

    python benchmarks/training_choices.py data/fashion-mnist --work runs/choices --record FILE.jsonl

Each choice is trained by `optcov train`, its NPR head is fitted, and the bound of NPR-DDPM in 10 even steps is taken on
test images, given their class. Differences from the first choice are paired by image and noise. Choices that are kept
in the work directory are not trained again. Steps of the U-Net all cost the same; the transformer's are of twice as
many images, at about the same cost. The CPU time of each training is recorded. Losses of different predictions or noise
levels weigh errors differently, so that only the bounds compare all choices.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import optcov
from optcov.data import load

COMMON = "--learning-rate 1e-3 --labels 10 --ema 0.999 --warmup 100 --no-flip --checkpoint-every 500 --schedule vp_sde"
UNET = "--channels 32,64,128 --layers 1 --groups 8 --head-dim 32 --batch-size 32"
DIT = "--network dit --patch-size 4 --width 128 --layers 6 --batch-size 64"
CHOICES = {
    "velocity, normal levels": f"{UNET} --prediction v_prediction --levels normal",
    "velocity, uniform times": f"{UNET} --prediction v_prediction --levels uniform",
    "noise, uniform times": f"{UNET} --prediction epsilon --levels uniform",
    "transformer on patches": f"{DIT} --prediction v_prediction --levels normal",
}


def train(choice: str, data: str, out: Path, steps: int) -> float:
    """Train one choice; returns the CPU time in seconds."""
    command = [sys.executable, "-m", "optcov", "train", data, "--out", str(out), "--steps", str(steps)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([*command, *COMMON.split(), *CHOICES[choice].split()], check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def last_loss(run: Path, share: float = 0.1) -> float:
    """Mean training loss of the last tenth of the steps."""
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = losses[-max(1, round(share * len(losses))) :]
    return sum(last) / len(last)


def bound(run: Path, data: str, count: int) -> list[float]:
    """bits/dim of NPR-DDPM in 10 even steps, of each test image given its class."""
    bundle = optcov.fit(run, data, heads=("npr",), evaluations=8000)
    test = load(data, "test")
    assert test.labels is not None
    process, trajectory = bundle.reverse_process("NPR-DDPM"), bundle.trajectory(10)
    found: list[float] = []
    for index in torch.arange(count).split(50):
        told = {"class_labels": torch.as_tensor(test.labels)[index].long()}
        with torch.no_grad():
            terms = optcov.elbo(process, test.x_0(index), trajectory, condition=told, images=index.tolist())
        found += terms.bits_per_dim().tolist()
    return found


def line(choice: str, kept: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of a choice."""
    bits = kept["bits"]
    scores, difference = torch.tensor(bits), torch.tensor(bits) - torch.tensor(first["bits"])
    return {
        "choice": choice,
        "settings": CHOICES[choice],
        "CPU minutes": round(kept["seconds"] / 60, 1),
        "loss": round(kept["loss"], 5),
        "bits/dim": round(float(scores.mean()), 4),
        "from the first": round(float(difference.mean()), 4),
        "standard error": round(float(difference.std() / len(bits) ** 0.5), 4),
    }


def main() -> None:
    """Train and score what is not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--work", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--images", type=int, default=200, help="test images that are scored")
    parser.add_argument("--record", type=Path, required=True, help="a line of JSON per choice")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    lines = []
    for choice in CHOICES:
        run = options.work / choice.replace(",", "").replace(" ", "-")
        kept = run / "bits.json"
        if not kept.exists():
            seconds = train(choice, options.data, run, options.steps)
            scores = {"seconds": seconds, "loss": last_loss(run), "bits": bound(run, options.data, options.images)}
            kept.write_text(json.dumps(scores))
        found.append(json.loads(kept.read_text()))
        lines.append(json.dumps(line(choice, found[-1], found[0])))
        print(lines[-1], flush=True)
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
