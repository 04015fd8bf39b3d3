"""Where `optcov fit` writes: nothing is replaced unasked, a stopped fit goes on and says so, nothing stays behind."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optcov
from command_line import runner
from optcov import Schedule
from optcov.bundle import Bundle
from optcov.cli import app
from small_bundles import save_with_images

pytestmark = pytest.mark.usefixtures("blank_pictures")
FIT = ["--heads", "npr", "--batch-size", "4", "--times", "3", "--measure-images", "4", "--calibration-samples", "0"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_images(tmp_path_factory.mktemp("inputs"), Schedule.linear(24))


@pytest.fixture
def here(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(*more: str, source: str = "small", out: str = "fitted") -> Any:
    return runner.invoke(app, ["fit", source, "images.npy", "--out", out, "--images", "16", *FIT, *more])


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def stopped_by(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a fit that gets a signal when all is done but to write the bundle."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background lets it be ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Bundle, "save", lambda *_: signal.raise_signal(number))
            return fit()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fit_does_not_replace_the_bundle_of_another_fit_unless_told(here: Path) -> None:
    assert fit().exit_code == 0
    before = files(here / "fitted")
    refused = fit("--seed", "1")
    assert str(refused.exception) == (
        "fitted holds the bundle of another fit (the seed changed from 0 to 1); give --overwrite to replace it, or "
        "another directory by --out"
    )
    assert files(here / "fitted") == before
    assert fit("--seed", "1", "--overwrite").exit_code == 0
    assert optcov.load("fitted").provenance["heads"]["seed"] == 1


def test_a_fit_does_not_replace_a_bundle_that_was_not_fitted_unless_told(here: Path) -> None:
    before = files(here / "small")
    refused = fit(out="small")
    assert "small holds a bundle already; give --overwrite to replace it" in str(refused.exception)
    assert files(here / "small") == before
    assert fit("--overwrite", out="small").exit_code == 0  # heads anew, in their own bundle
    again = fit(out="small")
    assert again.exit_code == 0, again.exception
    assert "small is this very fit already" in again.output


def test_a_fit_that_is_there_is_not_repeated(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit().exit_code == 0
    before = files(here / "fitted")
    (here / "fitted.work").mkdir()  # as a process leaves it that was killed after it had written the bundle
    monkeypatch.setattr("optcov.fitting.fit.fit_closed_form", None)
    again = fit()
    assert again.exit_code == 0, again.exception
    assert "fitted is this very fit already: nothing to do" in again.output
    assert "next: optcov sample fitted" in again.output
    assert "wrote" not in again.output
    assert files(here / "fitted") == before
    assert not (here / "fitted.work").exists()


def test_a_stopped_fit_says_that_it_goes_on_and_leaves_no_work_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fit(out="undisturbed")
    assert "goes on with" not in first.output
    assert stopped_by(signal.SIGINT, monkeypatch).exit_code == 130
    assert (here / "fitted.work" / "numbers.jsonl").exists()
    assert not (here / "fitted").exists()
    monkeypatch.setattr(sys.modules["optcov.fitting.measure"], "_measure_at", None)  # its numbers were kept
    again = fit()
    assert again.exit_code == 0, again.exception
    assert "goes on with the fit that was stopped: fits npr of small" in again.output
    assert not (here / "fitted.work").exists()
    found = {name.replace("fitted", "undisturbed", 1): content for name, content in files(here / "fitted").items()}
    assert found == files(here / "undisturbed")


def test_sigterm_stops_a_fit_with_a_word_and_its_own_exit_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = stopped_by(signal.SIGTERM, monkeypatch)
    assert stopped.exit_code == 143
    assert "stopped; the same command goes on with what is kept in fitted.work" in stopped.output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_unfinished_fit_of_other_settings_is_kept_unless_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped_by(signal.SIGINT, monkeypatch).exit_code == 130
    before = files(here / "fitted.work")
    assert "or give --overwrite to start anew" in str(fit("--measure-images", "5").exception)
    assert files(here / "fitted.work") == before
    assert fit("--measure-images", "5", "--overwrite").exit_code == 0
    assert optcov.load("fitted").provenance["numbers"]["images"] == 5
    assert not (here / "fitted.work").exists()


def test_more_images_than_there_are_are_said_and_recorded_as_those_there_are(here: Path) -> None:
    fitted = fit("--images", "1024", "--batch-size", "128", "--measure-images", "512")
    assert fitted.exit_code == 0, fitted.exception
    assert "on 36 images (1,024 asked for) of images.npy" in fitted.output
    assert "measures 36 images (512 asked for) at 3 times" in fitted.output
    history = optcov.load("fitted").provenance
    assert history["heads"]["images"] == history["numbers"]["images"] == 36
    for command in ("bpd", "trajectory"):
        told = runner.invoke(app, [command, "small", "images.npy", "--images", "100", "--times", "3", *STEPS[command]])
        assert told.exit_code == 0, told.exception
        assert SAID[command] in told.output
    images = ["--data", "images.npy", "--images", "100", "--train-images", "1000", "--times", "3", "--steps", "2"]
    told = runner.invoke(app, ["table", "bpd", "--bundle", "small", *images])
    assert told.exit_code == 0, told.exception
    assert ", 4 test images (100 asked for) and 36 training images (1,000 asked for), " in told.output


STEPS = {"bpd": ["--steps", "2", "--train-images", "2"], "trajectory": []}
SAID = {"bpd": "for 4 test images (100 asked for)", "trajectory": "for 36 train images (100 asked for)"}


def test_fewer_images_than_there_are_are_said_as_they_are(here: Path) -> None:
    np.save("images.npy", np.load("images.npy")[:30])
    assert "on 16 images of images.npy" in fit().output
