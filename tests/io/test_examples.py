"""The examples run as they are, and show what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def start(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return start


def test_a_diffusers_pipeline_samples_by_npr_ddim(run, tmp_path):
    assert "npr-ddim.png" in run("diffusers_npr_ddim")
    with Image.open(tmp_path / "npr-ddim.png") as picture:
        plain, ours = (picture.crop((0, y, 448, y + 112)) for y in (0, 112))
    darkest, lightest = ours.getextrema()
    assert lightest - darkest > 100  # images, not grey
    assert plain.tobytes() != ours.tobytes()


def test_a_new_covariance_with_a_head_of_its_own_is_fitted_scored_and_drawn(run):
    said = run("new_covariance")
    bits = {name: float(value) for name, value in re.findall(r"^([\w-]+) +(\d+\.\d+) ±", said, re.MULTILINE)}
    assert set(bits) == {"NPR-DDPM", "Abs-DDPM"}
    assert abs(bits["Abs-DDPM"] - bits["NPR-DDPM"]) < 0.5  # another estimate of the same variance
    assert "drew (4, 1, 28, 28) by Abs-DDIM" in said
    assert len((EXAMPLES / "new_covariance.py").read_text().splitlines()) < 80


def test_a_custom_network_trains_samples_and_scores(run):
    said = run("custom_network")
    bits = {name: float(value) for name, value in re.findall(r"^(\w+) +(-?\d+\.\d+) bits/dim", said, re.MULTILINE)}
    assert set(bits) == {"beta_tilde", "beta", "npr"}
    assert bits["npr"] < min(bits["beta"], bits["beta_tilde"])
