"""`optcov bpd` and `optcov trajectory` on a bundle of a few thousand weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import run, runner
from optcov import Schedule, bundle
from optcov.cli import app
from optcov.likelihood import Estimate, LikelihoodRow, pool_repeats
from small_bundles import save_with_images


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_images(tmp_path_factory.mktemp("likelihood"), Schedule.linear(40))


def test_bpd_gives_the_whole_table_and_its_plots(saved: Path, tmp_path: Path) -> None:
    options = ("--images", 4, "--train-images", 12, "--steps", "2,5,10,1000", "--times", 20, "--out", tmp_path)
    shown = json.loads(run("bpd", saved / "small", saved / "images.npy", *options, "--json"))
    rows = shown["rows"]
    covariances = {row["covariance"] for row in rows}
    assert covariances == {"beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr"}
    assert len(rows) == len(covariances) * 2 * 3  # K = 1000 does not fit on 20 times
    for row in rows:
        assert len(row["times"]) == row["K"]
        assert len(row["terms"]) == row["K"] + 1
        bits = sum(row["terms"]) / (8 * 8) / np.log(2)
        assert row["bits_per_dim"]["mean"] == pytest.approx(bits, rel=1e-9)
    assert shown == json.loads((tmp_path / "table.json").read_text())
    for name in ("bits-per-dim.png", "terms.png", "times.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    arguments = ["bpd", str(saved / "small"), str(saved / "images.npy"), *map(str, options)]
    again = runner.invoke(app, arguments, catch_exceptions=False)  # from the states of the sweeps
    assert "NPR-DDPM, even times" in again.stdout
    assert "SN-DDPM, optimal times" in again.stdout
    assert "K = 1000 left out: there are only 20 times" in again.output


@pytest.mark.usefixtures("blank_pictures")
def test_images_of_other_channels_are_scored_as_the_network_takes_them(saved: Path, tmp_path: Path) -> None:
    pixels = np.load(saved / "images.npy")
    np.save(tmp_path / "colour.npy", np.repeat(pixels, 3, axis=1))
    options = ("--times", 4, "--steps", 2, "--images", 2, "--train-images", 2, "--covariances", "beta", "--json")
    scores = [
        json.loads(run("bpd", saved / "small", images, "--out", tmp_path / images.stem, *options))["rows"]
        for images in (saved / "images.npy", tmp_path / "colour.npy")
    ]
    assert scores[0][0]["bits_per_dim"] == pytest.approx(scores[1][0]["bits_per_dim"])


@pytest.mark.usefixtures("blank_pictures")
def test_repeats_report_the_deviation_over_seeds(saved: Path, tmp_path: Path) -> None:
    options = (
        "--images",
        2,
        "--train-images",
        2,
        "--steps",
        "3",
        "--times",
        5,
        "--covariances",
        "npr",
        "--out",
        tmp_path,
    )
    shown = json.loads(run("bpd", saved / "small", saved / "images.npy", *options, "--repeats", 3, "--json"))
    assert [row["kind"] for row in shown["rows"]] == ["ET", "OT"]
    for row in shown["rows"]:
        assert row["bits_per_dim"]["count"] == 3
        assert row["bits_per_dim"]["standard_error"] > 0


def test_pooling_takes_the_deviation_of_one_run() -> None:
    rows = [LikelihoodRow("npr", "ET", 2, (1, 2), Estimate(bits, 0.1, 8), None, ()) for bits in (3.0, 4.0, 5.0)]
    (pooled,) = pool_repeats([[row] for row in rows])
    assert pooled.bits_per_dim == Estimate(4.0, 1.0, 3)
    assert pooled.difference is None


def test_pooling_pools_the_differences_too() -> None:
    bits = Estimate(3.0, 0.1, 8)
    rows = [LikelihoodRow("sn", "ET", 2, (1, 2), bits, Estimate(d, 0.5, 8), ()) for d in (1.0, 2.0, 3.0)]
    (pooled,) = pool_repeats([[row] for row in rows])
    assert pooled.difference == Estimate(2.0, 1.0, 3)


@pytest.mark.usefixtures("blank_pictures")
def test_every_covariance_has_a_last_step_of_its_own(saved: Path, tmp_path: Path) -> None:
    options = ("--images", 30, "--train-images", 2, "--steps", "3", "--times", 4, "--out", tmp_path)
    shown = json.loads(run("bpd", saved / "small", saved / "images.npy", *options, "--last-variance", "own", "--json"))
    assert {row["covariance"] for row in shown["rows"]} >= {"analytic", "npr_isotropic", "npr"}
    assert (shown["images"], shown["train_images"]) == (4, 2)  # as many as there are, not as many as were asked for


@pytest.mark.usefixtures("blank_pictures")
def test_runs_with_other_settings_share_a_directory_and_one_that_is_repeated_is_not_computed_again(
    saved: Path, tmp_path: Path
) -> None:
    options = ("--images", 2, "--train-images", 2, "--steps", "3", "--out", tmp_path, "--json")
    first = run("bpd", saved / "small", saved / "images.npy", "--times", 4, *options)
    states = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert len(states) == 2
    assert run("bpd", saved / "small", saved / "images.npy", "--times", 5, *options) != first
    assert run("bpd", saved / "small", saved / "images.npy", "--times", 4, *options) == first
    assert {path: path.stat().st_mtime_ns for path in states} == states
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_trajectories_are_kept_in_the_bundle_and_exported(saved: Path, tmp_path: Path) -> None:
    exported = tmp_path / "timesteps.json"
    options = ("--images", 4, "--max-steps", 6, "--out", tmp_path / "state", "--diffusers", exported)
    shown = json.loads(run("trajectory", saved / "small", saved / "images.npy", *options, "--json"))
    assert list(shown) == ["1", "2", "3", "4", "5", "6"]
    loaded = bundle.load(saved / "small")
    for K, entry in shown.items():
        assert list(loaded.trajectory(int(K), "optimal", "NPR-DDPM").times) == entry["times"]
        assert json.loads(exported.read_text())[K] == [t - 1 for t in reversed(entry["times"])]
    assert (tmp_path / "state" / "times.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bpd", "small", "images.npy", "--steps", "ten"], "not a list of whole numbers"),
        (["bpd", "small", "images.npy", "--steps", "-5,4"], "K = -5 is too few"),
        (["bpd", "small", "images.npy", "--steps", "50"], r"among [50] lies in 2..40"),
        (["bpd", "small", "images.npy", "--times", "1"], "times = 1 leaves no step"),
        (["bpd", "small", "images.npy", "--eta", "0", "--times", "5"], "infinite"),
        (["bpd", "small", "images.npy", "--last-variance", "big", "--times", "5"], "unknown last_variance"),
        (["bpd", "small", "images.npy", "--covariances", "range", "--times", "20", "--images", "2"], "head 'range'"),
        (["trajectory", "small", "images.npy", "--method", "DDIM"], "no finite variational bound"),
        (["trajectory", "fashion", "images.npy"], "is not a directory, so no trajectories can be stored in it"),
    ],
)
def test_mistakes_are_one_sentence(saved: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    command, model, data, *rest = arguments
    result = runner.invoke(app, [command, str(saved / model), str(saved / data), *rest, "--out", str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert not list(tmp_path.glob("*.safetensors"))  # refused before the sweep
