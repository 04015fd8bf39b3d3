"""`optcov fit` from a noise predictor to a bundle."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from typer.testing import CliRunner

import optcov
from optcov import Schedule
from optcov.bundle.weights import save_unet
from optcov.checkpoints import import_model
from optcov.cli import app
from optcov.data.modes import say_once
from optcov.fitting import TrainingError
from optcov.fitting.sources import open_predictor
from optcov.networks.unet import build_unet


@pytest.fixture(scope="module")
def predictor(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("fit")
    save_unet(directory / "unet", build_unet((1, 8, 8), channels=(8, 8), groups=4, head_dim=8))
    for name, channels in (("grey", 1), ("colour", 3)):
        pixels = np.random.default_rng(0).integers(0, 256, (32, 8, 8, channels), dtype=np.uint8)
        np.savez(directory / f"{name}.npz", images=pixels)
    return directory


def fit(predictor: Path, out: Path, *options: str, data: str = "grey.npz"):
    base = ["fit", str(predictor / "unet"), str(predictor / data), "--out", str(out), "--schedule", "vp_sde"]
    quick = [
        "--images",
        "32",
        "--batch-size",
        "16",
        "--times",
        "4",
        "--measure-images",
        "8",
        "--calibration-samples",
        "0",
    ]
    return CliRunner().invoke(app, [*base, *quick, *options])


def test_fit_writes_a_bundle_with_heads_numbers_and_history(predictor, tmp_path):
    result = fit(predictor, tmp_path / "bundle", "--heads", "sn,npr,range", "--half")
    assert result.exit_code == 0, result.output
    bundle = optcov.load(tmp_path / "bundle")
    assert sorted(bundle.heads) == ["npr", "range", "sn"]
    assert len(bundle.numbers.times) == 4
    history, used = bundle.provenance["heads"], optcov.data.load(predictor / "grey.npz")
    assert (history["loss"], history["seed"], history["images"], history["half"]) == ("gamma", 0, len(used), True)
    assert history["data"] == used.checksum
    assert history["optcov"] == bundle.provenance["numbers"]["optcov"] == optcov.__version__
    step = bundle.with_schedule("linear").reverse_process("SN-DDPM").step(torch.zeros(2, 1, 8, 8), 500, 400)
    assert bool(step.variance.isfinite().all())
    half = next(bundle.unet.parameters())
    assert torch.equal(half, half.half().float())  # rounded before the fit, so that heads belong to what is stored


def test_fit_goes_on_to_the_default_method(predictor, tmp_path):
    result = fit(predictor, tmp_path / "bundle", "--heads", "npr")
    assert result.stdout.splitlines()[-1] == f"next: optcov sample {tmp_path / 'bundle'}"


def test_a_head_that_has_not_settled_comes_with_advice(predictor, tmp_path, monkeypatch):
    from optcov.fitting import closed_form

    said = {}
    for tolerance in (1.0, 0.0):  # any step promises less than 1, and none less than 0
        monkeypatch.setattr(closed_form, "TOLERANCE", tolerance)
        said[tolerance] = " ".join(fit(predictor, tmp_path / f"within {tolerance}").output.split())
    assert "has not settled" not in said[1.0]
    assert "npr has not settled after" in said[0.0]
    assert "fit on more images" in said[0.0]


def test_paper_exact_heads_are_linear(predictor, tmp_path):
    result = fit(predictor, tmp_path / "bundle", "--paper-exact", "--heads", "npr", "--measure-images", "0")
    assert result.exit_code == 0, result.output
    bundle = optcov.load(tmp_path / "bundle")
    assert bundle.heads["npr"].transform == "linear"
    assert bundle.heads["npr"].kind == "conv"
    assert bundle.numbers is not None  # from the samples of the fit itself


def test_residual_heads_train_by_gradient_descent(predictor, tmp_path):
    result = fit(predictor, tmp_path / "bundle", "--kind", "residual", "--steps", "3", "--heads", "npr,sn")
    assert result.exit_code == 0, result.output
    bundle = optcov.load(tmp_path / "bundle")
    assert bundle.heads["npr"].kind == "residual"
    history = bundle.provenance["heads"]
    assert (history["learning_rate"], history["ema"], history["clip"], history["steps"]) == (1e-4, 0.9999, 1.0, 3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--kind residual --measure-images 0", "use measure_images of 2 or more"),
        ("--measure-images 1", "use measure_images of 2 or more"),
        ("--times 2", "use 3 times or more"),
        ("--times 0", "say how many"),
        ("--time-weighted", "weighted by time"),
        ("--kind dense", "choose timed or deep or conv or residual"),
        ("--kind timed --paper-exact", 'need loss "gamma"'),
        ("--heads other", "choose among"),
        ("--kind residual --score-samples 4", "28"),  # features of other images than these
        ("--score-samples 4", "use kind residual"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(predictor, tmp_path, options, reason):
    result = fit(predictor, tmp_path / "bundle", *options.split())
    assert isinstance(result.exception, ValueError)
    assert reason in str(result.exception)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("option", ["--images 0", "--batch-size 0", "--times -1", "--measure-images -1"])
def test_numbers_below_their_least_are_refused(predictor, tmp_path, option):
    assert fit(predictor, tmp_path / "bundle", *option.split()).exit_code == 2


def test_missing_test_images_and_a_directory_in_use_are_noticed_before_the_fit(predictor, tmp_path, monkeypatch):
    def no_fit(*_arguments, **_options):
        raise AssertionError("the fit began")

    monkeypatch.setattr("optcov.fitting.fit_closed_form", no_fit)
    np.savez(tmp_path / "train.npz", train=np.zeros((8, 8, 8, 1), np.uint8))
    result = fit(predictor, tmp_path / "bundle", "--calibration-samples", "64", data=str(tmp_path / "train.npz"))
    assert "name them 'test'" in str(result.exception)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    result = fit(predictor, tmp_path / "mine")
    assert "notes.txt" in str(result.exception)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_numbers_per_time_can_be_measured_alone(predictor, tmp_path):
    assert fit(predictor, tmp_path / "first", "--heads", "npr").exit_code == 0
    before = optcov.load(tmp_path / "first")
    again = ["fit", str(tmp_path / "first"), str(predictor / "grey.npz"), "--out", str(tmp_path / "second")]
    options = ["--heads", "none", "--times", "6", "--measure-images", "16", "--calibration-samples", "0"]
    result = CliRunner().invoke(app, [*again, *options])
    assert result.exit_code == 0, result.output
    after = optcov.load(tmp_path / "second")
    assert len(after.numbers.times) == 6
    assert after.provenance["numbers"]["images"] == 16
    assert after.provenance["heads"] == before.provenance["heads"]
    assert torch.equal(after.heads["npr"].conv.weight, before.heads["npr"].conv.weight)


def test_coloured_images_become_grey_for_a_grey_network_and_it_is_said(predictor, tmp_path, caplog):
    say_once.cache_clear()
    result = fit(predictor, tmp_path / "bundle", "--heads", "npr", data="colour.npz")
    assert result.exit_code == 0, result.output
    said = [record.message for record in caplog.records if "converted" in record.message]
    assert said == ["colour.npz (train): converted 29 RGB images to grey, which the network takes"]
    assert optcov.load(tmp_path / "bundle").image_shape == (1, 8, 8)


def test_images_of_another_size_are_refused(predictor, tmp_path):
    np.savez(tmp_path / "large.npz", images=np.zeros((8, 9, 8), np.uint8))
    result = fit(predictor, tmp_path / "bundle", data=str(tmp_path / "large.npz"))
    assert isinstance(result.exception, ValueError)
    assert "(1, 8, 8)" in str(result.exception)
    assert "(1, 9, 8)" in str(result.exception)
    assert not (tmp_path / "bundle").exists()


def test_a_head_of_another_backbone_is_refused_by_the_bundle(predictor, tmp_path):
    assert fit(predictor, tmp_path / "bundle", "--heads", "npr", "--half").exit_code == 0
    bundle = optcov.load(tmp_path / "bundle")
    other = open_predictor(predictor / "unet", half=False)  # not rounded: other weights
    with pytest.raises(ValueError, match="fit it again"):
        other.with_heads(bundle.heads, bundle.fingerprint)


def test_a_directory_that_holds_no_noise_predictor_is_refused(tmp_path):
    with pytest.raises(TrainingError, match=r"neither a run .* nor a bundle"):
        open_predictor(tmp_path)


def test_a_network_alone_is_taken_as_diffusers_trains_it(predictor):
    bundle = open_predictor(predictor / "unet")
    assert repr(bundle.schedule) == repr(Schedule.linear())
    assert (bundle.network.time_argument.scale, bundle.network.time_argument.shift) == (1, 1)  # it counts from 0
    cosine = open_predictor(predictor / "unet", "cosine")
    assert repr(cosine.schedule) == repr(Schedule.cosine())
    assert cosine.network.time_argument == bundle.network.time_argument
    real = open_predictor(predictor / "unet", "vp_sde")
    assert (real.schedule.steps, real.network.time_argument.scale) == (None, 999)


@pytest.mark.parametrize(
    ("file", "whole"), [("model_index.json", "pipeline"), ("run.json", "run"), ("config.json", "bundle")]
)
def test_a_part_of_what_knows_the_schedule_is_refused(predictor, tmp_path, file, whole):
    shutil.copytree(predictor / "unet", tmp_path / "unet")
    (tmp_path / file).write_text('{"format": "optcov-bundle"}')
    for take in (open_predictor, import_model):
        with pytest.raises(ValueError, match=f"a part of the {whole} {tmp_path}; give that"):
            take(tmp_path / "unet")


def test_a_part_is_known_behind_a_link_and_beside_a_scheduler_alone(predictor, tmp_path):
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    scheduler.save_pretrained(tmp_path / "scheduler")
    (tmp_path / "unet").symlink_to(predictor / "unet")
    with pytest.raises(ValueError, match=f"a part of the pipeline {tmp_path}; give that"):
        open_predictor(tmp_path / "unet")
    whole = open_predictor(tmp_path)
    assert whole.network.parameterisation == "v_prediction"
    assert repr(whole.schedule) != repr(Schedule.linear())


def test_another_config_beside_a_network_does_not_matter(predictor, tmp_path):
    shutil.copytree(predictor / "unet", tmp_path / "unet")
    (tmp_path / "config.json").write_text("// not JSON")
    assert repr(open_predictor(tmp_path / "unet").schedule) == repr(Schedule.linear())


@pytest.mark.parametrize("file", ["model_index.json", "run.json", "scheduler_config.json", "config.json"])
def test_a_schedule_is_refused_where_there_is_one(tmp_path, file):
    (tmp_path / file).write_text('{"format": "optcov-bundle"}')
    with pytest.raises(TrainingError, match="knows its schedule; leave --schedule out"):
        open_predictor(tmp_path, "cosine")


def test_an_unfinished_run_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"schedule": "vp_sde"}')
    with pytest.raises(TrainingError, match="not finished"):
        open_predictor(tmp_path)


def test_heads_trained_jointly_come_with_the_run(predictor, tmp_path):
    small = "--steps 2 --batch-size 4 --channels 8,8 --groups 4 --head-dim 8 --warmup 1 --joint-heads npr,sn"
    run = CliRunner().invoke(app, ["train", str(predictor / "grey.npz"), "--out", str(tmp_path), *small.split()])
    assert run.exit_code == 0, run.output
    assert re.search(r"stage 1 2/2 +loss [\d.]+ +lr \d\S+ +[\d.]+ images/s +[\d.]+ min left", run.output)
    bundle = open_predictor(tmp_path)
    assert sorted(bundle.heads) == ["npr", "sn"]
    assert bool((bundle.heads["npr"].conv.weight != 0).any())
    assert bundle.network(torch.zeros(1, 1, 8, 8), 0.5).head("npr").shape == (1, 1, 8, 8)
