"""`optcov restore` on a tiny bundle: files, pictures, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from command_line import CommandLine, run
from optcov import Schedule
from optcov.cli.restore import FIRST_SCREEN, make_operator
from small_bundles import SHAPE, small_bundle


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("restore")
    small_bundle(Schedule.linear(50)).save(directory / "small")
    pixels = np.random.default_rng(0).integers(0, 256, SHAPE[1:], dtype=np.uint8)
    Image.fromarray(pixels).save(directory / "whole.png")
    Image.fromarray(pixels[:4, :4]).save(directory / "little.png")
    Image.fromarray((np.arange(64).reshape(8, 8) % 2 * 255).astype(np.uint8)).save(directory / "mask.png")
    return directory


def restored(place: Path, *options: object) -> dict[str, object]:
    said = run("restore", place / "small", *options, "--samples", 3, "--steps", 2, "--json", "--out", place / "out")
    told: dict[str, object] = json.loads(said)
    return told


@pytest.mark.parametrize(
    "options",
    [
        ("--mask", "box:4x4"),
        ("--mask", "box:2x3+1+0", "--noise", 0),
        ("--mask", "random:0.5"),
        ("--blur", 1.0),
        ("--downscale", 2, "--mask", "box:1x1"),
        ("--noise", 0.2),
    ],
    ids=str,
)
def test_an_undamaged_image_is_damaged_and_restored(place: Path, options):
    told = restored(place, place / "whole.png", "--simulate", *options)
    assert told["samples"] == 3
    assert isinstance(told["psnr"], float)
    out = place / "out"
    with Image.open(out / "restoration.png") as picture:
        assert picture.width > 500
    with Image.open(out / "mean.png") as mean:
        assert mean.size == SHAPE[1:]
    assert len(list((out / "samples").iterdir())) == 3
    assert json.loads((out / "restoration.json").read_text()) == told


def test_a_damaged_image_is_restored_and_compared_with_the_truth(place: Path):
    told = restored(place, place / "little.png", "--downscale", 2, "--truth", place / "whole.png")
    assert isinstance(told["psnr"], float)
    assert restored(place, place / "whole.png", "--mask", place / "mask.png")["psnr"] is None


def test_options_are_combined_as_blur_then_size_then_mask():
    operator = make_operator(SHAPE, "box:1x1", 1.0, 2, "zero")
    assert operator.name == "mask of average of blur"
    assert operator.measurement_shape == (1, 4, 4)
    assert make_operator(SHAPE, None, None, None).apply(torch.ones(1, *SHAPE)).shape == (1, *SHAPE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("whole.png", "--mask", "boxes"), "is neither box:HxW"),
        (("whole.png", "--mask", "random:2"), "not a share"),
        (("whole.png", "--mask", "box:9x9"), "does not lie inside"),
        (("whole.png", "--downscale", 3), "does not divide"),
        (("whole.png", "--downscale", 2), "but (1, 4, 4) is needed"),
        (("whole.png", "--noise", "-1"), "not a standard deviation"),
        (("whole.png", "--blur", "nan"), "not a positive"),
        (("whole.png", "--method", "NPRR"), "unknown method"),
        (("missing.png",), "cannot read the image"),
        (("17",), "no held-out images come with small; give an image file"),
        (("whole.png", "--blur", "inf"), "not a positive number of pixels"),
        (("whole.png", "--noise", "1e300"), "not a standard deviation from 0 to"),
        (("whole.png", "--border", "zero"), "--border is for a blurred image"),
        (("whole.png", "--simulate", "--truth", "whole.png"), "leave it out"),
        (("whole.png", "--batch-size", 0), "--batch-size = 0 is not a positive whole number"),
        (("whole.png", "--out", ""), "--out is empty"),
        (("whole.png", "--simulate", "--noise", "1e6"), "the measurement has values beyond"),
        (("whole.png", "--out", "whole.png"), "cannot write"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_sentence(place: Path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(place)
    answer = CommandLine(capsys)("restore", "small", *options, "--steps", 2, "--samples", 1)
    assert answer.code == 2
    assert said in " ".join(answer.err.split())
    assert len(answer.err.strip().splitlines()) == 1  # nothing is announced first
    assert "Traceback" not in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_too_many_samples_are_refused_before_work_is_announced(place: Path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    answer = CommandLine(capsys)("restore", "small", "whole.png", "--steps", 2, "--samples", 10**6)
    assert answer.code == 2
    assert answer.err.startswith("error: 1000000 samples")


def test_the_first_screen_of_help_has_ten_options_at_most():
    assert len(FIRST_SCREEN) <= 10
    assert "--mask" in run("restore", "--help")
