"""How every command talks: what it will do, its result, where that is, what to run next; JSON alone for machines."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
from diffusers import DDPMPipeline, DDPMScheduler
from PIL import Image
from typer.testing import CliRunner

from image_files import small_data_set
from optcov import Schedule
from optcov.cli import COMMANDS, app, main
from small_bundles import save_with_images, small_unet

RUNS = {  # in this order: some use what others wrote
    "demo": "--mixture --points 50 --steps 3 --out demo.png",
    "info": "small",
    "fit": "pipeline images.npy --out fitted --images 32 --batch-size 8 --measure-images 0 --calibration-samples 64",
    "import": "pipeline --out imported",
    "sample": "small --method SN-DDIM --steps 3 --n 4 --out samples",
    "bpd": "small images.npy --times 6 --steps 3,5 --images 4 --train-images 4 --out bpd",
    "restore": "small image.png --mask box:3x3 --samples 2 --steps 2 --out restored",
    "trajectory": "small images.npy --times 6 --max-steps 4 --images 4 --out trajectory",
    "data": "fashion-mnist fashion",
    "train": "images.npy --out run --steps 2 --batch-size 4 --channels 8,8 --groups 4 --head-dim 8",
    "statistics": "clothes.npy clothes-statistics.npz --features fashion",
    "frechet": "clothes.npy clothes.npy --save-first statistics.npz",
    "table": "bpd --quick --bundle small --data images.npy --images 4 --train-images 4 --times 6 --steps 3 --out cells",
    "report": "cells --out report.html",
    "bench": "dynamic_program --rounds 2 --no-memory --out bench.json",
}
MISTAKES = {  # command -> words, and which of them the answer names
    "demo": ("--mixture --steps 0", "--steps"),
    "info": ("nothing", "nothing"),
    "fit": ("nothing images.npy --out fitted", "nothing"),
    "import": ("nothing --out imported", "nothing"),
    "sample": ("small --method magic", "magic"),
    "bpd": ("small nothing", "nothing"),
    "restore": ("small nothing.png", "nothing.png"),
    "trajectory": ("small nothing", "nothing"),
    "data": ("magic fashion", "magic"),
    "train": ("nothing --out run", "nothing"),
    "statistics": ("nothing out.npz --features fashion", "nothing"),
    "frechet": ("clothes.npy images.npy", "--features lite0"),  # they are not 28 x 28
    "table": ("magic", "magic"),
    "report": ("nothing", "nothing"),
    "bench": ("magic", "magic"),
}
BAD_WORDS = {"an unknown option": "--magic", "a missing value": "--seed --json"}


@dataclass(frozen=True)
class Said:
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with all that the commands need; they run in it."""
    directory = save_with_images(tmp_path_factory.mktemp("conversation"), Schedule.linear(24))
    DDPMPipeline(small_unet(), DDPMScheduler(24)).save_pretrained(directory / "pipeline")
    np.save(directory / "clothes.npy", np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8))
    Image.fromarray(np.load(directory / "images.npy")[0, 0]).save(directory / "image.png")
    before = Path.cwd()
    os.chdir(directory)
    with pytest.MonkeyPatch.context() as patch:
        small_data_set(directory, patch)
        yield directory
    os.chdir(before)


@pytest.fixture(scope="module")
def said(place: Path) -> dict[str, tuple[Said, Said]]:
    """What each command says to a person, and to a machine."""

    def run(name: str, more: str) -> Said:
        result = CliRunner().invoke(app, [name, *shlex.split(RUNS[name] + more)])
        assert result.exit_code == 0, (name, result.output, result.exception)
        return Said(result.stdout, result.stderr)

    return {name: (run(name, ""), run(name, " --json")) for name in RUNS}


def test_every_command_is_tried() -> None:
    assert set(RUNS) == set(MISTAKES) == set(COMMANDS) - {"play"}  # which serves until it is ended: test_play.py


@pytest.mark.parametrize("name", [name for name in RUNS if name != "info"])  # which does nothing but tell
def test_a_command_says_first_what_it_will_do(said: dict[str, tuple[Said, Said]], name: str) -> None:
    for answer in said[name]:
        first = answer.err.splitlines()[0]
        assert len(first.split()) >= 5
        assert "━" not in first  # not a progress bar
        assert not first.startswith("error")


@pytest.mark.parametrize("name", RUNS)
def test_a_command_ends_with_its_output_and_the_next_command(said: dict[str, tuple[Said, Said]], name: str) -> None:
    *_, wrote, following = said[name][0].out.splitlines()
    if name != "info":
        assert wrote.startswith("wrote ")
        assert Path(wrote.removeprefix("wrote ")).exists()
    assert following.startswith("next: ")
    program, command, *words = shlex.split(following.removeprefix("next: "))
    if program == "optcov":
        group = typer.main.get_command(app)
        assert isinstance(group, typer.core.TyperGroup)
        found = group.get_command(typer.Context(group), command)
        assert found is not None
        found.make_context(command, list(words))  # refuses options that there are not, and values of a wrong kind


@pytest.mark.parametrize("name", RUNS)
def test_a_machine_gets_json_and_nothing_else(said: dict[str, tuple[Said, Said]], name: str) -> None:
    assert json.loads(said[name][1].out)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, named = MISTAKES[name]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a name that is no file is looked for there
    assert named in refused([name, *shlex.split(words)], monkeypatch, capsys)


@pytest.mark.parametrize("words", BAD_WORDS.values(), ids=list(BAD_WORDS))
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_words_that_make_no_command_are_refused_in_one_sentence(
    place: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*name.split(), *words.split()], monkeypatch, capsys)
    assert said.endswith(f"; {' '.join(['optcov', *name.split(), '--help'])} tells what there is\n")


@pytest.mark.parametrize("value", ["0", "many"])
def test_a_refusal_repeats_the_value(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["sample", "fashion", "--steps", value], monkeypatch, capsys)
    assert "'--steps'" in said
    assert said.count(f"'{value}'") == 1


def refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused, and return the one sentence that it says."""
    monkeypatch.setattr(sys, "argv", ["optcov", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    return said.err
