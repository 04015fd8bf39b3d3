"""What is written can be read: import and fit check a model by the loader's own rules before any long work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from command_line import CommandLine
from optcov import Schedule, bundle
from optcov.bundle import Bundle, BundleError
from optcov.networks import Backbone, HeadedNetwork
from small_bundles import SHAPE, small_unet


@pytest.fixture
def optcov(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(small_unet(), DDPMScheduler()).save_pretrained(tmp_path / "pipeline")
    pixels = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), dtype=np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    return tmp_path / "pipeline"


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def arguments(command: str, pipeline: Path) -> tuple[object, ...]:
    out = ("--out", pipeline.parent / "out")
    if command == "import":
        return "import", pipeline, *out
    small = ("--heads", "npr", "--images", 16, "--measure-images", 2, "--times", 3, "--calibration-samples", 0)
    return "fit", pipeline, pipeline.parent / "images.npy", *out, *small


REFUSED = {
    "a key that this diffusers does not know": ("unet/config.json", {"surprise": 3}, "'surprise' = 3"),
    "a size of 16384": ("unet/config.json", {"sample_size": 16384}, "67108864 values"),
    "a size of 10000": ("unet/config.json", {"sample_size": 10000}, "67108864 values"),
    "a size that cannot be halved": ("unet/config.json", {"sample_size": 7}, "cannot compute images of shape"),
    "a setting of the wrong type": ("unet/config.json", {"norm_eps": "x"}, "norm_eps = 'x'"),
    "more betas than a schedule has steps": (
        "scheduler/scheduler_config.json",
        {"trained_betas": [1e-5] * 100_001, "num_train_timesteps": 1000},
        "more than 100000 steps",
    ),
}


@pytest.mark.parametrize("command", ["import", "fit"])
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_could_not_be_loaded_is_refused_before_the_work(
    pipeline: Path, optcov: CommandLine, case: str, command: str
) -> None:
    file, settings, words = REFUSED[case]
    change(pipeline / file, **settings)
    with (
        mock.patch.object(Bundle, "save", side_effect=AssertionError("saved")),
        mock.patch("optcov.fitting.fit.fit_closed_form", side_effect=AssertionError("fitted")),
    ):
        said = optcov(*arguments(command, pipeline))
    assert said.code == 2, said.out
    assert words in said.err
    assert len([line for line in said.err.splitlines() if line.startswith("error: ")]) == 1
    assert not (pipeline.parent / "out").exists()


@pytest.mark.parametrize("command", ["import", "fit"])
@pytest.mark.parametrize("off", [None, False])
def test_an_unknown_key_that_is_off_is_dropped_with_a_word(
    pipeline: Path, optcov: CommandLine, command: str, off: bool | None
) -> None:
    change(pipeline / "unet" / "config.json", surprise=off)
    said = optcov(*arguments(command, pipeline))
    assert said.code == 0, said.err
    assert "leaves out 'surprise' of the network's config" in said.err
    out = pipeline.parent / "out"
    assert bundle.load(out).image_shape == SHAPE
    assert "surprise" not in json.loads((out / "unet" / "config.json").read_text())


def test_images_of_a_hundred_thousand_pixels_are_refused_by_import(pipeline: Path, optcov: CommandLine) -> None:
    said = optcov(*arguments("import", pipeline), "--image-size", 100_000)
    assert said.code == 2
    assert "67108864 values" in said.err
    assert not (pipeline.parent / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_shape": (1, 10_000, 10_000)}, "67108864 values"),
        ({"image_shape": (3, 8, 8)}, "images of 3 channels"),
        ({"data_range": (-1.0, 1e308)}, "data_range"),
        ({"data_range": (1.0, -1.0)}, "data_range"),
        ({"noise_caps": {"SN-DDPM": -1.0}}, "noise_caps"),
    ],
    ids=str,
)
def test_a_bundle_that_could_not_be_loaded_is_not_saved(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    network = HeadedNetwork(Backbone.of(small_unet()), Schedule.linear(24)).eval()
    made = Bundle(network, **{"image_shape": SHAPE, **options})
    with pytest.raises(BundleError, match=words):
        made.save(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_schedule_of_too_many_steps_is_not_saved(tmp_path: Path) -> None:
    schedule = Schedule.from_betas(torch.full((100_001,), 1e-6, dtype=torch.float64))
    made = Bundle(HeadedNetwork(Backbone.of(small_unet()), schedule).eval(), SHAPE)
    with pytest.raises(BundleError, match="more than 100000 steps"):
        made.save(tmp_path / "out")


def test_training_refuses_a_network_that_could_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optcov.data import ImageSet
    from optcov.fitting import TrainingConfig, UNetShape, train_noise_predictor
    from optcov.networks import unet_config

    monkeypatch.setattr(unet_config, "MAX_CHANNELS", 4)
    images = ImageSet(torch.zeros(8, 1, 8, 8, dtype=torch.uint8))
    shape = UNetShape((8, 8), groups=4, head_dim=8)
    with pytest.raises(ValueError, match="is larger than any network here"):
        next(iter(train_noise_predictor(images, tmp_path / "run", TrainingConfig(steps=1), shape)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("run", "unet", "words"),
    [
        ({"joint_heads": 5}, {}, "joint_heads"),
        ({"joint_heads": ["../../sn"]}, {}, "no name for a head"),
        ({}, {"sample_size": None}, "sample_size"),
        ({}, {"sample_size": [8, 8, 8]}, "sample_size"),
    ],
    ids=str,
)
def test_a_run_that_does_not_say_what_it_trained_is_refused_in_one_sentence(
    tmp_path: Path, run: dict[str, Any], unet: dict[str, Any], words: str
) -> None:
    from optcov.fitting.sources import open_predictor

    small_unet().save_pretrained(tmp_path / "unet")
    change(tmp_path / "unet" / "config.json", **unet)
    (tmp_path / "run.json").write_text(json.dumps({"schedule": "linear", **run}))
    with pytest.raises(ValueError, match=words):
        open_predictor(tmp_path)
