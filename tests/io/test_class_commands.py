"""Commands on a class-conditional bundle: rows of classes, guidance, bounds by labels, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from class_bundles import CLASSES, class_bundle, class_unet
from command_line import CommandLine
from optcov import Schedule, storage
from optcov.bundle.weights import save_unet
from small_bundles import SHAPE, small_bundle

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Bundles `classes` and `plain`, a run, and images with labels, without, and with wrong ones."""
    directory = tmp_path_factory.mktemp("commands")
    class_bundle(Schedule.linear(50)).save(directory / "classes")
    small_bundle(Schedule.linear(50)).save(directory / "plain")
    save_unet(directory / "run" / "unet", class_unet())
    storage.write_json(directory / "run" / "run.json", {"schedule": "linear", "network": {"classes": CLASSES}})
    pixels = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), dtype=np.uint8)
    np.savez(directory / "labelled.npz", images=pixels, labels=np.arange(40) % CLASSES)
    np.savez(directory / "wrong.npz", images=pixels, labels=np.arange(40) % 7)
    np.save(directory / "bare.npy", pixels)
    return directory


@pytest.fixture
def optcov(capsys) -> CommandLine:
    return CommandLine(capsys)


def image(directory: Path, number: int) -> np.ndarray:
    return np.asarray(Image.open(directory / "images" / f"{number:06d}.png")).astype(int)


def test_without_a_class_every_class_gets_a_row(place, optcov, tmp_path):
    options = ("sample", place / "classes", "--steps", "2", "--json")
    said = optcov(*options, "--n", "24", "--out", tmp_path / "all")
    assert said.code == 0, said.err
    settings = json.loads(said.out)["settings"]
    assert settings["condition"] == {"labels": [0, 1, 2], "images of a row": 8}
    assert optcov(*options, "--n", "9", "--class", "1", "--out", tmp_path / "one").code == 0
    assert np.abs(image(tmp_path / "all", 8) - image(tmp_path / "one", 8)).max() <= 1
    assert np.abs(image(tmp_path / "all", 0) - image(tmp_path / "one", 0)).max() > 1


def test_more_images_of_the_same_classes_are_drawn_later_and_others_are_refused(place, optcov, tmp_path):
    options = ("sample", place / "classes", "--steps", "2", "--out", tmp_path / "out", "--json")
    assert optcov(*options, "--n", "2", "--class", "1", "--class", "none", "--guidance", "2").code == 0
    said = optcov(*options, "--n", "9", "--class", "1", "--class", "none", "--guidance", "2")
    assert (said.code, json.loads(said.out)["drawn"]) == (0, 7)
    for other, reason in (
        (("--class", "2", "--guidance", "2"), "condition"),
        (("--class", "1", "--class", "none", "--guidance", "3"), "guidance changed from 2.0 to 3.0"),
        (("--class", "1", "--class", "none"), "guidance changed from 2.0 to none"),
    ):
        said = optcov(*options, "--n", "9", *other)
        assert said.code == 2
        assert reason in said.err


@pytest.mark.parametrize(
    ("bundle", "options", "reason"),
    [
        ("classes", ["--class", "3"], "--class '3' is no class of classes; they are 0 to 2, and none for no class"),
        ("classes", ["--class", "-1"], "--class '-1' is no class"),
        ("classes", ["--class", "shoe"], "--class 'shoe' is no class"),
        ("classes", ["--guidance", "-1"], "guidance = -1.0 is no weight"),
        ("classes", ["--guidance", "nan"], "guidance = nan is no weight"),
        ("plain", ["--class", "1"], "plain knows no classes; leave --class out"),
        ("plain", ["--guidance", "2"], "needs an empty condition"),
    ],
    ids=str,
)
def test_classes_that_are_none_are_refused_and_nothing_is_written(place, optcov, tmp_path, bundle, options, reason):
    said = optcov("sample", place / bundle, "--steps", "2", "--n", "2", "--out", tmp_path / "out", *options)
    assert said.code == 2
    assert reason in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


def test_pictures_of_a_bundle_with_classes(place, optcov, tmp_path):
    options = ("sample", place / "classes", "--n", "4", "--guidance", "1.5")
    said = optcov(
        *options, "--compare", "--methods", "NPR-DDIM;DDIM", "--compare-steps", "2", "--out", tmp_path / "c.png"
    )
    assert (said.code, (tmp_path / "c.png").is_file()) == (0, True)
    assert optcov(*options, "--steps", "3", "--variance-map", "--out", tmp_path / "v").code == 0
    assert (tmp_path / "v" / "variance.png").is_file()


def test_bounds_take_the_labels_of_the_data_unless_told_not_to(place, optcov, tmp_path):
    def bound(*more):
        words = [
            "bpd",
            place / "classes",
            place / "labelled.npz",
            "--images",
            "2",
            "--train-images",
            "2",
            "--times",
            "4",
        ]
        said = optcov(
            *words, "--times", "4", "--steps", "4", "--covariances", "npr", "--json", "--out", tmp_path / "bpd", *more
        )
        assert said.code == 0, said.err
        return [row["bits_per_dim"]["mean"] for row in json.loads(said.out)["rows"]]

    given, without = bound(), bound("--no-labels")
    assert given != without
    assert bound() == given


def test_a_run_on_labels_becomes_a_bundle(place, optcov, tmp_path):
    quick = ("--heads", "npr", "--images", "16", "--measure-images", "2", "--times", "3", "--calibration-samples", "16")
    said = optcov("fit", place / "run", place / "labelled.npz", "--out", tmp_path / "made", "--json", *quick)
    assert said.code == 0, said.err
    network = json.loads(said.out)["network"]
    assert (network["classes"], network["empty_condition"]) == (CLASSES, ["class_labels"])
    said = optcov("info", tmp_path / "made")
    assert "3; one more stands for no class" in said.out


def test_a_fit_on_labels_out_of_range_is_refused_and_nothing_is_written(place, optcov, tmp_path):
    said = optcov("fit", place / "run", place / "wrong.npz", "--out", tmp_path / "made")
    assert said.code == 2
    assert "has images of class 3, but the 3 classes of run are 0 to 2" in " ".join(said.err.split())
    assert not list(tmp_path.iterdir())
