"""Ways to train the embedded model, at equal time: the bound of each after so many minutes of one core.

    python benchmarks/training_choices.py data/fashion-mnist --work runs/choices --record FILE.jsonl

Each choice is trained by `optcov train`, its NPR head is fitted, and the bound of NPR-DDPM in 10 even steps is taken on
test images, given their class. Differences from the first choice are paired by image and noise. Choices that are kept
in the work directory are not trained again. Steps of the U-Net all cost the same; the transformer's are of twice as
many images, at the same cost.
"""

from __future__ import annotations

import argparse
import json
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


def train(choice: str, data: str, out: Path, steps: int) -> None:
    """Train one choice."""
    command = [sys.executable, "-m", "optcov", "train", data, "--out", str(out), "--steps", str(steps)]
    subprocess.run([*command, *COMMON.split(), *CHOICES[choice].split()], check=True, stdout=subprocess.DEVNULL)


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


def line(choice: str, bits: list[float], first: list[float]) -> dict[str, Any]:
    """What is recorded of a choice."""
    scores, difference = torch.tensor(bits), torch.tensor(bits) - torch.tensor(first)
    return {
        "choice": choice,
        "settings": CHOICES[choice],
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
    scores: list[list[float]] = []
    lines = []
    for choice in CHOICES:
        run = options.work / choice.replace(",", "").replace(" ", "-")
        kept = run / "bits.json"
        if not kept.exists():
            train(choice, options.data, run, options.steps)
            kept.write_text(json.dumps(bound(run, options.data, options.images)))
        scores.append(json.loads(kept.read_text()))
        lines.append(json.dumps(line(choice, scores[-1], scores[0])))
        print(lines[-1], flush=True)
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
