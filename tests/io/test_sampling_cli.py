"""`optcov sample` from end to end on a tiny bundle: files, pictures, resuming after a real kill, refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from optcov import Schedule
from optcov.bundle import Bundle
from optcov.cli import app, main
from optcov.data import to_8bit
from optcov.methods import DEFAULT_METHOD, HEAD_METHOD, METHODS, PEER_METHODS
from small_bundles import SHAPE, small_bundle, small_head
from two_processes import ENVIRONMENT, LAUNCH
from warm_commands import Ended

CODE_OF_INTERRUPT = 130


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Path:
    """Two bundles: `discrete` with 50 times, `sde` in continuous time."""
    directory = tmp_path_factory.mktemp("bundles")
    small_bundle(Schedule.linear(50)).save(directory / "discrete")
    small_bundle(Schedule.vp_sde()).save(directory / "sde")
    return directory


@pytest.fixture
def optcov(monkeypatch, capsys):
    """Run the command line as a user does; returns exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optcov", "sample", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return run


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def pixels(directory: Path, n: int) -> np.ndarray:
    return np.stack([np.asarray(Image.open(directory / "images" / f"{i:06d}.png")) for i in range(n)])


def test_png_files_are_the_images_that_the_library_draws(bundles, tmp_path, optcov):
    out = tmp_path / "run"
    code, said, _ = optcov(bundles / "discrete", "--steps", 4, "--n", 5, "--batch-size", 2, "--out", out, "--json")
    assert code == 0
    done = json.loads(said)
    assert (done["images"], done["drawn"], done["evaluations"]) == (5, 5, 4.0)
    assert done["settings"]["method"] == DEFAULT_METHOD
    drawn = small_bundle(Schedule.linear(50)).sample(5, steps=4, progress=False)
    difference = pixels(out, 5).astype(int) - to_8bit(drawn)[:, 0].numpy().astype(int)
    assert np.abs(difference).max() <= 1  # batches of 2 and of 5 round differently
    with Image.open(out / "grid.png") as grid:
        assert grid.width > 500  # the images above a caption
    assert sorted(p.name for p in out.iterdir()) == [".lock", "grid.png", "images", "run.json"]


def test_shards_hold_the_same_images_as_files(bundles, tmp_path, optcov):
    for name, n in (("png", 5), ("npz", 3), ("npz", 5)):  # the second run into npz goes on with the first
        code, _, said = optcov(
            bundles / "discrete", "--steps", 3, "--n", n, "--batch-size", 2, "--format", name, "--out", tmp_path / name
        )
        assert code == 0
    assert "2 images drawn, 3 network evaluations each; 3 were there already" in said
    names = sorted(p.name for p in (tmp_path / "npz" / "shards").iterdir())
    assert names == ["images-000000-000001.npz", "images-000002-000002.npz", "images-000003-000004.npz"]
    shards = np.concatenate([np.load(tmp_path / "npz" / "shards" / name)["images"] for name in names])
    assert np.abs(shards[:, 0].astype(int) - pixels(tmp_path / "png", 5).astype(int)).max() <= 1


@pytest.mark.parametrize("file_format", ["png", pytest.param("npz", marks=pytest.mark.long)])
def test_a_run_killed_while_it_writes_goes_on_to_the_same_bytes(bundles, tmp_path, commands, file_format):
    """kill -9 strikes between writing a file and giving it its name: the worst moment.

    All three runs are processes of one kind with one thread each, as equal bytes need.
    """

    def run(out: str, **conditions: object) -> Ended:
        options = f"--method NPR-DDPM --steps 3 --n 9 --batch-size 1 --seed 4 --format {file_format} --out {out}"
        return commands.run("sample", bundles / "discrete", *options.split(), cwd=tmp_path, **conditions)

    killed = run("killed", fault={"of": ["replace"], "at": 7, "how": "kill"})
    assert killed.code == -signal.SIGKILL, killed.err
    written = files(tmp_path / "killed")
    assert len([name for name in written if name.endswith(f".{file_format}")]) == 5  # run.json was the first of six
    assert run("whole").code == 0
    again = run("killed")
    assert again.code == 0
    assert "4 images drawn" in again.err
    whole, resumed = files(tmp_path / "whole"), files(tmp_path / "killed")
    assert resumed == whole  # what the killed run was writing is gone
    assert all(resumed[name] == content for name, content in written.items() if not name.endswith(".part"))


def test_comparison_shows_methods_peers_and_adaptive_solvers(bundles, tmp_path, optcov):
    out = tmp_path / "compare.png"
    methods = "DDPM, beta; SN-DDIM; UniPC; Gotta Go Fast"
    code, said, _ = optcov(
        bundles / "sde", "--compare", "--methods", methods, "--compare-steps", "2,3", "--n", 2, "--out", out, "--json"
    )
    assert code == 0
    assert json.loads(said)["steps"] == [2, 3]
    with Image.open(out) as picture:
        assert picture.height > picture.width  # four rows, two columns


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compare", "--steps", 7), "--compare does not take --steps; use --compare-steps"),
        (("--compare", "--method", "UniPC"), "--compare does not take --method; use --methods"),
        (("--compare", "--variance-map"), "--compare does not take --variance-map; leave it out"),
        (("--methods", "DDIM;UniPC"), "--methods needs --compare; add it, or leave --methods out"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(bundles, tmp_path, optcov, options, said):
    code, _, told = optcov(bundles / "discrete", *options, "--out", tmp_path / "out")
    assert code == 2
    assert said in told
    assert not (tmp_path / "out").exists()


def test_variance_map_stands_beside_the_images_and_leaves_json_whole(bundles, tmp_path, optcov):
    code, said, _ = optcov(
        bundles / "sde", "--steps", 3, "--n", 3, "--variance-map", "--json", "--out", tmp_path, "--method", "NPR-DDPM"
    )
    assert code == 0
    picture = Path(json.loads(said)["variance_map"])
    assert picture == tmp_path / "variance.png"
    with Image.open(picture) as image:
        assert image.width > image.height  # three pairs beside each other


def test_the_help_of_sample_names_the_default_method_and_lists_every_method():
    shown = " ".join(CliRunner().invoke(app, ["sample", "--help"], env={"COLUMNS": "500"}).output.split())
    assert f"By default {DEFAULT_METHOD}" in shown
    for name in [*METHODS, *PEER_METHODS]:
        assert name in shown


def test_the_picture_of_methods_shows_the_baseline_that_is_hard_to_beat_first(bundles, tmp_path, optcov):
    options = ("--compare-steps", 2, "--n", 1, "--out", tmp_path / "compare.png", "--json")
    code, said, _ = optcov(bundles / "discrete", "--compare", *options)
    assert code == 0
    shown = ["DDPM, beta-tilde", "DDPM, beta", "DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM", DEFAULT_METHOD]
    assert json.loads(said)["methods"] == shown


def test_the_picture_of_methods_has_no_more_steps_than_the_bundle_has_times(tmp_path, optcov):
    small_bundle(Schedule.linear(24)).save(tmp_path / "short")
    options = ("--methods", "DDIM", "--n", 1, "--out", tmp_path / "compare.png", "--json")
    code, said, _ = optcov(tmp_path / "short", "--compare", *options)
    assert code == 0
    assert json.loads(said)["steps"] == [5, 10]


def test_a_head_fitted_anew_is_another_run(bundles, tmp_path, optcov):
    bundle = small_bundle(Schedule.linear(50))
    bundle.with_heads({"npr": small_head(7)}, bundle.fingerprint).save(tmp_path / "discrete")
    common = ("--method", "NPR-DDIM", "--steps", 2, "--n", 1, "--out", tmp_path / "run")
    assert optcov(bundles / "discrete", *common)[0] == 0
    code, _, said = optcov(tmp_path / "discrete", *common)
    assert code == 2
    assert "belongs to another run: the bundle was refitted: its npr head changed" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "SNDDIM"], "unknown method 'SNDDIM'; did you mean SN-DDIM"),
        (["--method", "DDIM", "--steps", "1"], "K = 1 is outside 2..50"),
        (["--steps", "51"], "steps = 51 is more than this schedule has times; take at most 50"),
        (["--n", "0"], "--n 0 and --batch-size 64 must be positive"),
        (["--batch-size", "0"], "must be positive"),
        (["--method", "SN-DPM"], "runs in continuous time, but the schedule has 50 steps"),
        (["--method", "Euler-Maruyama"], "needs Schedule.vp_sde()"),
        (["--method", "Improved DDPM"], "no head 'range'"),
        (["--method", "Improved DDPM", "--variance-map"], "no head 'range'"),
        (["--method", "UniPC", "--variance-map"], "UniPC estimates no variance of x_0"),
        (["--method", "DDIM", "--variance-map"], "DDIM takes the variance of x_0 to be 0"),
        (["--method", "DDPM, beta-tilde", "--variance-map"], f"choose a method such as {HEAD_METHOD}"),
        (["--method", "DDPM, beta", "--variance-map"], "DDPM, beta takes the variance of x_0 to be the same for every"),
        (["--method", "A-DDPM", "--variance-map"], "A-DDPM takes the variance of x_0 to be the same for every"),
        (["--method", ""], "unknown method ''"),
        (["--method", "npr_correlated"], "unknown method 'npr_correlated'; did you mean CNPR-DDPM or CNPR-DDIM?"),
        (["--no-clip"], "--no-clip needs a method with a covariance, and Bridge 2M has none"),
        (["--ocm-probes", "8"], "--ocm-probes needs a method with a covariance"),
        (["--method", "OCM-DDPM"], "optcov sample --ocm-probes 8"),
        (["--method", "UniPC", "--last-step", "draw"], "leave trajectory, noise_cap and last_step out"),
        (["--method", "DDIM", "--trajectory", "odd"], "unknown kind of trajectory 'odd'"),
        (["--method", "DDIM", "--trajectory", "optimal"], "optimal"),
        (["--trajectory", "optimal"], "choose a method such as NPR-DDIM"),
        (["--schedule", "sigmoid"], "sigmoid"),
        (["--format", "gif"], "unknown format 'gif'"),
        (["--method", "DDIM", "--noise-cap", "-1"], "noise_cap = -1.0 must be a positive number"),
        (["--method", "DDIM", "--last-step", "first"], "last_step = 'first' is not one of mean, draw"),
        (["--compare", "--compare-steps", "5,x"], "'5,x' is not a list of whole numbers"),
        (["--compare", "--methods", "DDIM;no"], "unknown method 'no'"),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_leaves_no_images(bundles, tmp_path, optcov, arguments, message):
    code, out, said = optcov(bundles / "discrete", *arguments, "--out", tmp_path / "run")
    assert code == 2
    assert out == ""
    assert message in said
    assert "Traceback" not in said
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"]


def test_a_directory_of_another_run_or_of_another_process_is_refused(bundles, tmp_path, optcov):
    from optcov.storage import directory_lock

    common = (bundles / "discrete", "--steps", 2, "--n", 1, "--out", tmp_path / "run")
    assert optcov(*common)[0] == 0
    before = files(tmp_path / "run")
    for more, message in (
        (["--seed", 1], "the seed changed from 0 to 1"),
        (["--format", "npz"], "the format changed from png to npz"),
    ):
        code, _, said = optcov(*common, *more)
        assert (code, message in said) == (2, True), said
    with directory_lock(tmp_path / "run"):
        code, _, said = optcov(*common)
    assert (code, "in use by another process" in said) == (2, True), said
    assert files(tmp_path / "run") == before
    (tmp_path / "file").write_text("")
    code, _, said = optcov(bundles / "discrete", "--steps", 2, "--n", 1, "--out", tmp_path / "file" / "run")
    assert (code, said.splitlines()[-1].startswith("error: cannot use")) == (2, True), said


def test_ctrl_c_says_how_to_go_on(bundles, tmp_path, optcov, monkeypatch):
    from optcov.data.sample_directory import SampleDirectory

    save = SampleDirectory.save

    def interrupted(self, images, indices):
        save(self, images, indices)
        if indices[-1] == 1:
            raise KeyboardInterrupt

    common = (bundles / "discrete", "--steps", 2, "--n", 4, "--batch-size", 1, "--out", tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(SampleDirectory, "save", interrupted)
        code, _, said = optcov(*common)
    assert code == CODE_OF_INTERRUPT
    assert "the same command goes on" in said
    assert "Traceback" not in said
    code, _, said = optcov(*common)
    assert code == 0
    assert "2 images drawn" in said


def test_a_network_that_returns_nan_is_named_and_nothing_is_written(bundles, tmp_path, optcov):
    bundle = small_bundle(Schedule.linear(50))
    with torch.no_grad():
        bundle.unet.conv_out.weight.fill_(3e38)
    Bundle(bundle.network, SHAPE, name="bad").save(tmp_path / "bad")
    code, _, said = optcov(
        tmp_path / "bad", "--method", "DDPM, beta", "--steps", 3, "--n", 2, "--out", tmp_path / "run"
    )
    assert code == 2
    assert "NaN or infinity: first at step 1 (time 50), in samples [0, 1]" in said
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock"]


@pytest.mark.long
def test_two_processes_share_the_images_and_draw_the_same_ones(bundles, tmp_path, optcov):
    arguments = [bundles / "discrete", "--steps", 3, "--n", 9, "--batch-size", 3, "--format", "npz"]
    launched = subprocess.run(
        [*LAUNCH, "-m", "optcov", "sample", *map(str, [*arguments, "--out", tmp_path / "two", "--json"])],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout)["drawn"] == 9
    assert optcov(*arguments, "--out", tmp_path / "one")[0] == 0
    drawn = [
        np.concatenate([np.load(p)["images"] for p in sorted((tmp_path / name / "shards").glob("*.npz"))])
        for name in ("one", "two")
    ]
    assert np.abs(drawn[0].astype(int) - drawn[1].astype(int)).max() <= 1
    shards = [sorted(p.name[7:20] for p in (tmp_path / name / "shards").glob("*.npz")) for name in ("one", "two")]
    assert shards[0] == ["000000-000002", "000003-000005", "000006-000008"]
    assert shards[1] == ["000000-000002", "000003-000003", "000004-000006", "000007-000008"]  # two began, at 0 and 4
