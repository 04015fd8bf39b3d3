"""Commands that are killed, at random moments and at every single write, and started again: the same result.

The undisturbed run of each command is made once; each disturbed one happens in a directory of its own, is repeated
without the fault, and must end with the same files, byte for byte but for what tells of speed, and nothing beside them.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from reliability_runs import COMMANDS, Inputs, arguments, inputs_unchanged, results
from warm_commands import Ended, WarmCommands

LONG_COMMANDS = sorted(COMMANDS)
KILLED = -signal.SIGKILL


class Undisturbed:
    """One run of each command that nothing happens to, made when it is first asked for."""

    def __init__(self, commands: WarmCommands, inputs: Inputs, directory: Path):
        self._commands, self._inputs, self._directory = commands, inputs, directory
        self._runs: dict[str, tuple[Ended, dict[str, Any]]] = {}

    def __getitem__(self, command: str) -> tuple[Ended, dict[str, Any]]:
        if command not in self._runs:
            where = self._inputs.prepare(self._directory / command)
            ended = self._commands.run(*arguments(command), cwd=where, save_always=True)
            assert ended.code == 0, ended.err
            self._runs[command] = ended, results(where)
        return self._runs[command]


@pytest.fixture(scope="module")
def undisturbed(commands: WarmCommands, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(commands, inputs, tmp_path_factory.mktemp("undisturbed"))


def killed_at(commands: WarmCommands, command: str, where: Path, moment: float) -> Ended:
    run = commands.start(*arguments(command), cwd=where, save_always=True)
    time.sleep(moment)
    run.signal(signal.SIGKILL)
    return run.wait()


def goes_on(commands: WarmCommands, command: str, where: Path, expected: dict[str, Any], inputs: Inputs) -> None:
    again = commands.run(*arguments(command), cwd=where, save_always=True)
    assert again.code == 0, again.err
    found = {name: content for name, content in results(where).items() if not is_claimed_leftover(name)}
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert inputs_unchanged(where, inputs)


def is_claimed_leftover(name: str) -> bool:
    """Whether this is a temporary file in a directory that several processes may share, where none tidies up."""
    path = Path(name)
    return path.name.startswith(".") and path.suffix == ".part" and path.parent.name == "scratch"


def kill_at_random_moments(
    commands: WarmCommands, undisturbed: Undisturbed, inputs: Inputs, directory: Path, command: str, kills: int
) -> None:
    ended, expected = undisturbed[command]
    moments = random.Random(command)
    done = 0
    for attempt in range(10 * kills):
        where = inputs.prepare(directory / f"{attempt}")
        if killed_at(commands, command, where, moments.uniform(0, ended.seconds)).code == KILLED:
            done += 1
            goes_on(commands, command, where, expected, inputs)
        if done == kills:
            return
    pytest.fail(f"only {done} of {kills} kills struck before the command had ended")


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_a_command_killed_at_a_random_moment_ends_as_if_nothing_had_been(
    commands, undisturbed, inputs, tmp_path, command
):
    kill_at_random_moments(commands, undisturbed, inputs, tmp_path, command, kills=1)


@pytest.mark.long
@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_a_command_killed_at_twenty_random_moments_ends_as_if_nothing_had_been(
    commands, undisturbed, inputs, tmp_path, command
):
    kill_at_random_moments(commands, undisturbed, inputs, tmp_path, command, kills=20)


def fail_at_every(
    functions: tuple[str, ...], how: str, commands: WarmCommands, inputs: Inputs, directory: Path, command: str
) -> int:
    """Let the first, second, ... call fail, each in a directory of its own, and go on; returns how many there were."""
    counted = commands.run(
        *arguments(command),
        cwd=inputs.prepare(directory / "counted"),
        save_always=True,
        fault={"of": functions, "at": 0, "how": how},
    )
    assert counted.code == 0, counted.err
    expected = results(directory / "counted")
    for at in range(1, counted.writes + 1):
        where = inputs.prepare(directory / str(at))
        fault = {"of": functions, "at": at, "how": how}
        ended = commands.run(*arguments(command), cwd=where, save_always=True, fault=fault)
        if how == "kill":
            assert ended.code == KILLED
        else:
            assert ended.code == 2, ended.err
            assert "Traceback" not in ended.err
            assert ended.err.strip().splitlines()[-1].startswith("error: cannot write out/run"), ended.err
        goes_on(commands, command, where, expected, inputs)
    return counted.writes


@pytest.mark.parametrize(
    "command", ["sample", pytest.param("fit", marks=pytest.mark.long), pytest.param("train", marks=pytest.mark.long)]
)
def test_a_command_killed_before_any_file_gets_its_name_goes_on(commands, inputs, tmp_path, command):
    """The worst moment: the new file is written, and the old one still has the name."""
    assert fail_at_every(("replace",), "kill", commands, inputs, tmp_path, command) >= 4


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "error"])
@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_a_command_that_fails_at_any_call_of_any_write_goes_on(commands, inputs, tmp_path, command, how):
    """Every flush to disk, of files and of directories, and every change of a name: a kill, and a full disk."""
    assert fail_at_every(("fsync", "replace", "rename"), how, commands, inputs, tmp_path, command) >= 10
