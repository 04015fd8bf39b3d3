"""A full disk, a directory that may not be written, Ctrl-C, and two processes in one directory: one clear sentence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from optcov.console import INTERRUPTED, TERMINATED
from optcov.storage import read_tensors
from reliability_runs import COMMANDS, arguments, results
from warm_commands import Ended

LIMIT = 3000  # bytes: more than the commands say, less than the least of what they must write


def assert_one_sentence(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, ended.err
    assert all(word in said[0] for word in words), said[0]


def assert_whole(path: Path) -> None:
    """Half of a file of tensors, or of a picture, cannot be opened."""
    assert path.suffix in (".json", ".jsonl", ".safetensors", ".png")
    if path.suffix == ".safetensors":
        read_tensors(path)
    elif path.suffix == ".png":
        with Image.open(path) as picture:
            picture.load()


@pytest.mark.parametrize("command", ["train", "fit", "sample", "bpd", "table"])
def test_a_file_too_large_for_the_disk_is_named_and_leaves_no_half(commands, inputs, tmp_path, command):
    """A limit on the size of files fails in the middle of a write, as a full disk does, and needs no privileges."""
    where = inputs.prepare(tmp_path / command)
    assert_one_sentence(commands.run(*arguments(command), cwd=where, file_size=LIMIT), "cannot write", "File too large")
    for name in results(where):  # which reads the JSON
        assert_whole(where / name)
    assert not list((where / "out").rglob(".*.part"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB in memory, where mounting one is permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root; the test with a limit on file sizes stands for it")
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    mounted = subprocess.run([mount, *options], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("command", ["train", "sample"])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(commands, inputs, tmp_path, small_disk, command):
    where = inputs.prepare(tmp_path / "work")
    (where / "out").symlink_to(small_disk)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as stream:
        stream.write(bytes(56 * 1024))
    assert_one_sentence(commands.run(*arguments(command), cwd=where), "cannot write", "No space left on device")
    assert not list(small_disk.rglob(".*.part"))
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    ended = commands.run(*arguments(command), cwd=where)
    assert ended.code == 0, ended.err


def test_a_disk_that_becomes_read_only_is_named_and_the_run_goes_on_when_it_is_not(
    commands, inputs, tmp_path, small_disk
):
    """What a file system does after an error of its disk, for root too, whom permissions do not stop."""
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    where = inputs.prepare(tmp_path / "work")
    (where / "out").symlink_to(small_disk)
    for command in ("sample", "train"):
        begun = ["--n", "2"] if command == "sample" else []
        more = ["--n", "6"] if command == "sample" else ["--out", "out/another"]
        assert commands.run(*arguments(command), *begun, cwd=where).code == 0
        before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        try:
            ended = commands.run(*arguments(command), *more, cwd=where)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        assert_one_sentence(ended, "out/", "Read-only file system")
        assert before == {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
        assert commands.run(*arguments(command), *more, cwd=where).code == 0
        shutil.rmtree(small_disk / "run")


def test_a_directory_that_may_not_be_written_is_named(commands, inputs, tmp_path):
    """/proc is a directory in which nobody can make files, whoever runs the test."""
    for command in ("train", "fit", "sample", "bpd", "table"):
        where = inputs.prepare(tmp_path / command)
        (where / "out").symlink_to("/proc/self")
        assert_one_sentence(commands.run(*arguments(command), cwd=where), "out/run")


@pytest.mark.parametrize(
    ("command", "sent", "code"),
    [
        *((command, signal.SIGINT, INTERRUPTED) for command in ("train", "heads", "sample", "bpd", "table")),
        ("heads", signal.SIGTERM, TERMINATED),  # as `kill` and schedulers of jobs send it
    ],
)
def test_a_signal_ends_a_command_cleanly_and_says_what_to_run(commands, inputs, tmp_path, command, sent, code):
    where = inputs.prepare(tmp_path / command)
    long = {"train": "--steps 100000", "heads": "--steps 100000", "sample": "--n 100000 --batch-size 1"}
    more = long.get(command, "--train-images 20 --times 24 --batch-size 1 --images 20").split()
    run = commands.start(*arguments(command), *more, cwd=where, save_always=True)
    deadline = time.monotonic() + 120
    while not [p for p in (where / "out").rglob("*") if p.suffix in (".png", ".jsonl", ".safetensors")]:
        assert time.monotonic() < deadline, "the command did not begin to write"
        time.sleep(0.01)
    time.sleep(0.1)
    run.signal(sent)
    ended = run.wait()
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert "the same command goes on with what is kept in out/run" in ended.err
    assert f"optcov {' '.join([*arguments(command), *more])}" in ended.err
    assert not list((where / "out").rglob(".*.part"))


@pytest.mark.parametrize("command", ["train", "fit", "sample", "bpd"])
def test_a_directory_in_use_by_another_process_is_refused_and_left_alone(commands, inputs, tmp_path, command):
    from optcov.storage import directory_lock

    where = inputs.prepare(tmp_path / command)
    held = where / "out" / ("run.work" if command == "fit" else "run")
    with directory_lock(held):
        assert_one_sentence(commands.run(*arguments(command), cwd=where), "is in use by another process", "out/run")
    assert results(where) == {}


def test_every_long_command_is_put_to_these_tests():
    assert set(COMMANDS) == {"train", "fit", "heads", "sample", "bpd", "table"}


def test_training_with_other_settings_leaves_the_record_of_the_first(commands, inputs, tmp_path):
    where = inputs.prepare(tmp_path / "train")
    assert commands.run(*arguments("train"), cwd=where).code == 0
    before = results(where)
    assert_one_sentence(commands.run(*arguments("train"), "--seed", "7", cwd=where), "the seed changed from 0 to 7")
    assert results(where) == before


def test_numbers_of_another_network_are_not_taken_for_ones_own(commands, inputs, tmp_path):
    """A fit replaces no bundle of another network, and takes nothing that was kept for it."""
    from optcov import Schedule
    from optcov.bundle import Bundle
    from optcov.networks import Backbone, HeadedNetwork
    from small_bundles import SHAPE, small_unet

    where = inputs.prepare(tmp_path / "fit")
    assert commands.run(*arguments("fit"), cwd=where).code == 0
    other = HeadedNetwork(Backbone.of(small_unet(seed=5)), Schedule.linear(24)).eval()
    Bundle(other, SHAPE, name="other").save(where / "other")
    changed = ["other" if part == "small" else part for part in arguments("fit")]
    assert_one_sentence(commands.run(*changed, cwd=where), "out/run holds the bundle of another fit (the weights")
