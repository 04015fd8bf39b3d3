"""A command that can go on does not go on with what belongs to something else, and says what changed.

Each command runs once; then one thing changes under the same names, and the same command runs again. It must refuse,
leave every file as it was, and name the change; or, where what is kept is named after its identity, compute anew.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import runner
from optcov import Schedule, experiments
from optcov import cli as command_line
from optcov.bundle import Bundle
from optcov.cli import app
from optcov.networks import Backbone, HeadedNetwork, TimeArgument
from reliability_runs import results
from small_bundles import SHAPE, small_head, small_numbers, small_unet

pytestmark = pytest.mark.usefixtures("blank_pictures")
STEPS = 24


@dataclass(frozen=True)
class World:
    """What a command works on: a bundle and images, each part of which can change."""

    weights: int = 0
    norm_eps: float = 1e-5
    npr: int = 1
    sn: int = 2
    numbers: float = 1.0
    beta: float = 1.0  # of a step in the middle, times its usual value
    scale: float = 1000 / STEPS
    prediction: str = "epsilon"
    data_range: tuple[float, float] = (-1.0, 1.0)
    turned: bool = False  # as many images with the same sums, each turned by a quarter

    def write(self, directory: Path) -> Path:
        betas = Schedule.linear(STEPS).betas.clone()
        betas[STEPS // 2] *= self.beta
        schedule = Schedule.from_betas(betas)
        backbone = Backbone.of(small_unet(self.weights, norm_eps=self.norm_eps))
        network = HeadedNetwork(backbone, schedule, None, TimeArgument(self.scale), self.prediction).eval()
        plain = Bundle(network, SHAPE, self.data_range, name="small")
        heads = {"npr": small_head(self.npr), "sn": small_head(self.sn)}
        numbers = small_numbers(schedule)
        numbers = replace(numbers, mean_square_noise=self.numbers * numbers.mean_square_noise)
        shutil.rmtree(directory / "small", ignore_errors=True)
        plain.with_heads(heads, plain.fingerprint).with_numbers(numbers).save(directory / "small")
        pixels = np.random.default_rng(0).integers(0, 256, (40, *SHAPE), dtype=np.uint8)
        np.savez(directory / "images.npz", images=np.rot90(pixels, axes=(2, 3)) if self.turned else pixels)
        clothes = np.random.default_rng(1).integers(0, 256, (8, 1, 28, 28), dtype=np.uint8)
        np.savez(directory / "clothes.npz", images=np.rot90(clothes, axes=(2, 3)) if self.turned else clothes)
        return directory


BUNDLE = {  # change -> what is said
    "weights": (World(weights=5), "the weights of the network changed"),
    "settings of the network": (World(norm_eps=1e-3), "the settings of the network changed"),
    "schedule": (World(beta=1.01), "the schedule changed"),
    "time argument": (World(scale=1.0), r"the time argument changed from \(t - 0\) \* 41.6667 to \(t - 0\) \* 1"),
    "prediction type": (World(prediction="sample"), "the prediction type changed from epsilon to sample"),
    "data range": (World(data_range=(-2.0, 2.0)), r"the data range changed from \(-1.0, 1.0\) to \(-2.0, 2.0\)"),
}
WEIGHTS = {"weights": BUNDLE["weights"]}
NPR = {"npr head": (World(npr=7), "the bundle was refitted: its npr head changed")}
SN = {"sn head": (World(sn=7), "the bundle was refitted: its sn head changed")}
NUMBERS = {"numbers": (World(numbers=0.5), "the bundle was refitted: its numbers per time changed")}
DATA = {"data": (World(turned=True), "the (train |held-out )?images changed")}
SAME = World()

FIT = "fit small images.npz --out out/run --heads npr --batch-size 4 --times 3 --measure-images 4"
CLOSED_FORM = f"{FIT} --images 16 --calibration-samples 0"
BY_STEPS = f"{FIT} --kind residual --steps 2 --checkpoint-every 1 --calibration-samples 0"
TINY_NETWORK = "--channels 8,8 --groups 4 --head-dim 8"


@dataclass(frozen=True)
class Command:
    """A command, the changes that it must notice, and options that change its numbers with what is said of them."""

    line: str
    changes: dict[str, tuple[World, str]]
    options: dict[str, str]
    stopped: bool = False  # in its first run, when all is done but to write the result


COMMANDS = {
    "sample": Command(
        "sample small --out out/run --method NPR-DDPM --steps 2 --n 2",
        {**BUNDLE, **NPR},
        {
            "--seed 1": "the seed changed from 0 to 1",
            "--steps 3": "the steps changed from 2 to 3",
            "--method SN-DDPM": "the method changed from NPR-DDPM to SN-DDPM",
            "--noise-cap 3": "the noise cap changed from .* to 3.0",
            "--last-step draw": "the last step changed from mean to draw",
            "--schedule cosine": "the schedule changed from",
        },
    ),
    "sample by numbers per time": Command("sample small --out out/run --method A-DDPM --steps 2 --n 2", NUMBERS, {}),
    "bpd": Command(
        "bpd small images.npz --out out/run --images 2 --train-images 2 --times 3 --steps 2",
        {**BUNDLE, **NPR, **SN, **NUMBERS, **DATA},
        {},
    ),
    "trajectory": Command(
        "trajectory small images.npz --out out/run --images 2 --times 3", {**BUNDLE, **NPR, **DATA}, {}
    ),
    "fit": Command(
        CLOSED_FORM,
        {**BUNDLE, **SN, **DATA},
        {
            "--seed 1": "the seed changed from 0 to 1",
            "--images 8": "the samples changed from 16 to 8",
            "--heads npr,range": r"the fitted heads changed from \(npr\) to \(npr, range\)",
            "--times 4": "the times changed from 3 to 4",
            "--measure-images 5": "the measure images changed from 4 to 5",
            "--flip": "the flip changed from False to True",
            "--kind conv": "the kind changed from auto to conv",
            "--kind residual": "the kind changed from auto to residual",
            "--paper-exact": "the loss changed from gamma to mse",
        },
    ),
    "fit, stopped": Command(
        CLOSED_FORM, {**WEIGHTS, **DATA}, {"--seed 1": "the seed changed from 0 to 1"}, stopped=True
    ),
    "heads, stopped": Command(
        BY_STEPS,
        {**WEIGHTS, **SN, **DATA},
        {"--learning-rate 0.5": "the learning rate changed from 0.0001 to 0.5", "--steps 3": "the steps changed"},
        stopped=True,
    ),
    "train": Command(
        f"train images.npz --out out/run --steps 2 --batch-size 4 {TINY_NETWORK} --warmup 1",
        DATA,
        {
            "--seed 1": "the seed changed from 0 to 1",
            "--schedule linear": "the schedule changed from vp_sde to linear",
            "--channels 8,16": r"the channels changed from \(8, 8\) to \(8, 16\) \(of its network\)",
            "--learning-rate 0.5": "the learning rate changed from 0.0002 to 0.5",
            "--no-flip": "the flip changed from True to False",
        },
    ),
    "statistics": Command(
        "statistics clothes.npz out/run/clothes.npz --features fashion",
        DATA,
        {"--rows 5": "the rows changed from 8 to 5"},
    ),
}
TABLE = "table bpd --bundle small --data images.npz --images 2 --train-images 2 --times 6 --steps 6 --json"
RESUMABLE = {"sample", "bpd", "trajectory", "fit", "train", "table", "statistics"}


def run(line: str, more: str = "") -> Any:
    return runner.invoke(app, [*line.split(), *more.split()])


def stop_before_the_end(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory in which a command has run, made once for each."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            where = SAME.write(tmp_path_factory.mktemp("done"))
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(where)
                if COMMANDS[name].stopped:
                    patch.setattr(Bundle, "save", stop_before_the_end)
                assert run(COMMANDS[name].line).exit_code == (130 if COMMANDS[name].stopped else 0)
            made[name] = where
        return made[name]

    return make


def refused(where: Path, line: str, more: str, said: str) -> None:
    """The command says in one sentence what changed, without a digest, and leaves every file as it was."""
    before = results(where)
    assert before
    error = run(line, more).exception
    assert isinstance(error, ValueError), error
    assert re.search(said, str(error)), str(error)
    assert not re.search(r"[0-9a-f]{20}|\n", re.sub(str(where), "", str(error))), str(error)
    assert results(where) == before


def cases(of: Callable[[Command], dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}: {case}") for name, command in COMMANDS.items() for case in of(command)
    ]


@pytest.mark.parametrize(("name", "change"), cases(lambda command: command.changes))
def test_a_command_does_not_go_on_after_its_inputs_changed(done, tmp_path, monkeypatch, name, change):
    world, said = COMMANDS[name].changes[change]
    shutil.copytree(done(name), tmp_path / "here")
    monkeypatch.chdir(world.write(tmp_path / "here"))
    refused(tmp_path / "here", COMMANDS[name].line, "", said)


@pytest.mark.parametrize(("name", "option"), cases(lambda command: command.options))
def test_a_command_does_not_go_on_with_other_options(done, tmp_path, monkeypatch, name, option):
    shutil.copytree(done(name), tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    refused(tmp_path / "here", COMMANDS[name].line, option, COMMANDS[name].options[option])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_on_after_its_inputs_were_written_anew_without_a_change(done, tmp_path, monkeypatch, name):
    shutil.copytree(done(name), tmp_path / "here")
    monkeypatch.chdir(SAME.write(tmp_path / "here"))
    again = run(COMMANDS[name].line)
    assert again.exit_code == 0, again.exception


@pytest.mark.filterwarnings("ignore:.* has noise levels outside those the network was trained on")
@pytest.mark.parametrize(
    "option",
    ["--seed 1", "--train-images 3", "--eta 0.5", "--schedule cosine"],
)
def test_bpd_with_other_options_is_computed_anew_in_the_same_directory(done, tmp_path, monkeypatch, option):
    shutil.copytree(done("bpd"), tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("optcov.likelihood.result.Likelihoods.plot_all", lambda *_: None)
    line = COMMANDS["bpd"].line
    old = json.loads(run(f"{line} --json").stdout)
    mixed = run(f"{line} {option} --json")
    fresh = run(f"{line.replace('out/run', 'out/fresh')} {option} --json")
    assert mixed.exit_code == fresh.exit_code == 0
    assert json.loads(mixed.stdout) == json.loads(fresh.stdout)
    assert json.loads(mixed.stdout) != old
    assert json.loads(run(f"{line} --json").stdout) == old  # and the first is still there


TABLE_CHANGES = {**BUNDLE, **NPR, **DATA}


@pytest.fixture(scope="module")
def tabled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    where = SAME.write(tmp_path_factory.mktemp("tabled"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        return where, json.loads(run(f"{TABLE} --out out/run").stdout)["sections"]


@pytest.mark.parametrize("change", TABLE_CHANGES)
def test_a_table_is_computed_anew_after_its_inputs_changed(tabled, tmp_path, monkeypatch, change):
    where, old = tabled
    shutil.copytree(where, tmp_path / "here")
    monkeypatch.chdir(TABLE_CHANGES[change][0].write(tmp_path / "here"))
    mixed, fresh = (json.loads(run(f"{TABLE} --out out/{name}").stdout)["sections"] for name in ("run", "fresh"))
    assert mixed == fresh
    assert mixed != old


def test_every_command_that_can_be_stopped_is_put_to_these_tests():
    rooms = (Path(command_line.__file__).parent, Path(experiments.__file__).parent / "commands")
    files = [path for room in rooms for path in room.glob("*.py")]
    can = {path.stem for path in files if re.search(r"with resumable\(", path.read_text())}
    assert can == RESUMABLE == {name.split()[0].rstrip(",") for name in COMMANDS} - {"heads"} | {"table"}


def test_two_bundles_do_not_share_a_directory_of_bits_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(SAME.write(tmp_path))
    shutil.copytree("small", "other")
    options = "--images 2 --train-images 2 --times 3 --steps 2"
    for name in ("small", "other"):
        assert run(f"bpd {name} images.npz {options}").exit_code == 0
        assert json.loads(Path(f"out/{name}-bpd/table.json").read_text())["bundle"] == name


def test_a_directory_in_which_nothing_was_kept_is_free(tmp_path, monkeypatch):
    monkeypatch.chdir(SAME.write(tmp_path))
    line = "bpd small images.npz --out out/run --images 2 --train-images 2 --times 3 --steps 2"
    assert "range" in str(run(line, "--covariances range").exception)
    assert Path("out/run/run.json").exists()
    World(weights=5).write(tmp_path)
    assert run(line).exit_code == 0


def test_a_schedule_is_known_by_its_levels_and_not_by_its_name():
    betas = Schedule.linear(100).betas
    other = betas.clone()
    other[50] *= 1.0001
    one, two = Schedule.from_betas(betas), Schedule.from_betas(other)
    assert repr(one) == repr(two)
    assert one.digest() != two.digest()
    assert one.digest() == Schedule.linear(100).digest()
    rounded = Schedule.from_betas(betas * (1 + torch.finfo(torch.float64).eps))  # as another machine computes them
    assert one.digest() == rounded.digest()
    kinds = [Schedule.vp_sde(), Schedule.vp_sde(0.1, 20.1), Schedule.ve_sde(), Schedule.ve_sde(0.01, 51.0)]
    kinds += [Schedule.vp_sde().on_grid(), Schedule.linear(), Schedule.cosine()]
    assert len({schedule.digest() for schedule in kinds}) == len(kinds)
