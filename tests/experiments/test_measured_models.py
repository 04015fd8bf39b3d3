"""What was measured of the embedded models was measured of the networks that are in the package today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optcov import bundle

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "measurements"
TRAINING = " ".join((ROOT / "docs/training.md").read_text(encoding="utf-8").split())
FILES = (
    *("covariances/cifar10", "covariances/cifar10-apart", "sn-forms/cifar10", "restoration/cifar10"),
    *("causes/ocm-trace", "causes/correlated-parts", "causes/restoration-jacobian", "causes/image-parts"),
)


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (MEASURED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model() -> bundle.Bundle:
    return bundle.load("cifar10")


@pytest.mark.parametrize("name", FILES)
def test_each_line_is_of_the_embedded_network(name, model):
    own = [line for line in lines(name) if line.get("bundle", "cifar10") == "cifar10"]
    assert {line["model"] for line in own} == {model.digest()[:12]}


def test_clipping_in_more_steps_is_of_the_embedded_fashion():
    assert {line["model"] for line in lines("clipping/steps")} == {bundle.load("fashion").digest()[:12]}


def test_the_gain_of_correlations_by_training_ends_with_the_embedded_network(model):
    training = lines("causes/correlated-training")
    last = [line for line in training if line["epochs"] == max(line["epochs"] for line in training)]
    assert {line.get("model") for line in last} == {model.digest()[:12]}


@pytest.mark.parametrize("name", ["fashion", "cifar10"])
def test_the_record_of_the_training_ends_with_the_last_run_of_the_model(name):
    (*_, last) = (line["run"] for line in lines(f"training/{name}") if "run" in line)
    stored = bundle.load(name).provenance["stage1"]
    assert {key: stored[key] for key in ("steps", "batch_size", "seed", "ema")} == {
        key: last[key] for key in ("steps", "batch_size", "seed", "ema")
    }


def test_what_more_training_gives_stands_in_the_page():
    found = lines("training/cifar10-epochs")
    for line in found:
        distances = {name: f"{limit:.2f} ± {error:.2f}" for name, (limit, error) in line["FID"].items()}
        gaps = [line[f"NPR-{process} less {other}"] for process, other in (("DDPM", "A-DDPM"), ("DDIM", "DDIM"))]
        ddpm, ddim = (f"{gap:+.2f} ± {error:.2f}".replace("-", "−") for gap, error in gaps)
        cells = (f"{line['npr']['mean']:.3f}", distances["NPR-DDPM"], ddpm, distances["NPR-DDIM"], ddim)
        assert f"| after {line['epochs']} epochs | {' | '.join(cells)} | {distances['UniPC']} |" in TRAINING
    before, after = (line["NPR-DDIM less DDIM"] for line in found)
    assert abs(before[0]) < 2 * before[1]
    assert after[0] < -3 * after[1]


def test_the_loss_of_the_last_parts_stands_in_the_page():
    ends: list[list[float]] = []
    for line in lines("training/cifar10"):
        if "run" in line:
            ends.append([])
        else:
            ends[-1].append(line["loss"])
    before, after = (sum(losses[-20:]) / 20 for losses in ends[-2:])
    assert f"from {before:.4f} to {after:.4f}" in TRAINING
