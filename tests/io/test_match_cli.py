"""`optcov match` prepares few steps on a bundle of a few thousand weights, and keeps what it measured in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command_line import run, runner
from optcov import Schedule, bundle
from optcov.bundle.matched import few_step_times
from optcov.cli import app
from small_bundles import save_with_images

FEW = ("--samples", 16, "--images", 32)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_with_images(tmp_path, Schedule.linear(40))


def test_sampling_takes_what_was_measured(saved: Path) -> None:
    shown = json.loads(run("match", saved / "small", saved / "images.npy", "--steps", "3,4", *FEW, "--json"))
    found = bundle.load(saved / "small")
    for K in (3, 4):
        times = few_step_times(found.schedule, K)
        assert shown[str(K)]["times"] == list(found.matched_noise(K).trajectory.times) == list(times.times)
    drawn = found.sample(2, method="Matched 2M", steps=4, progress=False)
    assert bool(drawn.isfinite().all())


def test_a_second_call_keeps_what_the_first_measured(saved: Path) -> None:
    run("match", saved / "small", saved / "images.npy", "--steps", "3", *FEW)
    first = bundle.load(saved / "small").matched_noise(3)
    said = run("match", saved / "small", saved / "images.npy", "--steps", "5", *FEW)
    assert "next: optcov sample" in said
    assert "--method 'Matched 2M' --steps 5" in said
    again = bundle.load(saved / "small")
    assert torch.equal(again.matched_noise(3).power, first.power)
    assert len(again.matched) == 2
    assert "Matched 2M in 3, 5 steps" in run("info", saved / "small")


@pytest.mark.filterwarnings("ignore:.*noise levels outside")
def test_another_schedule_is_kept_beside_the_own_one(saved: Path) -> None:
    run("match", saved / "small", saved / "images.npy", "--steps", "3", "--schedule", "cosine", *FEW)
    assert bundle.load(saved / "small").schedule.grid_size == 40
    assert len(bundle.load(saved / "small", "cosine").matched_noise(3).trajectory) == 3
    with pytest.raises(ValueError, match="has no matched noise for 3 steps"):
        bundle.load(saved / "small").matched_noise(3)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("small", ["--steps", "ten"], "not a list of whole numbers"),
        ("small", ["--steps", "1"], "steps = 1"),
        ("small", ["--steps", "50"], "50"),
        ("fashion", [], "is not a directory, so nothing can be stored in it"),
    ],
)
def test_mistakes_are_one_sentence(saved: Path, model: str, options: list[str], message: str) -> None:
    result = runner.invoke(app, ["match", str(saved / model), str(saved / "images.npy"), *options])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not bundle.load(saved / "small").matched
