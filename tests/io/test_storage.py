from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optcov import storage
from optcov.storage import (
    StorageError,
    atomic_writer,
    claim,
    directory_lock,
    read_json,
    read_tensors,
    require_writable,
    write_bytes,
    write_files,
    write_json,
    write_tensors,
)

REAL_FSYNC, REAL_REPLACE = os.fsync, os.replace  # before conftest.py has the first do nothing


def write_each(a: Path, b: Path) -> None:
    write_bytes(a, b"x")
    write_bytes(b, b"x")


def write_both(a: Path, b: Path) -> None:
    write_files({a: b"x", b: b"x"})


def test_json_and_tensors_come_back_as_they_were(tmp_path):
    write_json(tmp_path / "deep" / "a.json", {"x": [1, 2.5, "é"]})
    assert read_json(tmp_path / "deep" / "a.json") == {"x": [1, 2.5, "é"]}
    tensors = {"a": torch.arange(6).reshape(2, 3).T, "b": torch.tensor(1.5, dtype=torch.float64)}
    write_tensors(tmp_path / "t.safetensors", tensors, {"note": "x"})
    back, metadata = read_tensors(tmp_path / "t.safetensors")
    assert metadata == {"note": "x"}
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_equal_tensors_and_metadata_are_equal_bytes(tmp_path):
    metadata = {name: name.upper() for name in "dcba"}
    for number in range(8):
        write_tensors(tmp_path / str(number), {"x": torch.ones(3), "y": torch.zeros(2).double()}, metadata)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1
    assert read_tensors(tmp_path / "0")[1] == metadata


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path):
    write_bytes(tmp_path / "a", b"old")
    require_writable(tmp_path / "a")
    require_writable(tmp_path / "new" / "b")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "new"]
    assert (tmp_path / "a").read_bytes() == b"old"
    for wrong in (tmp_path, tmp_path / "a" / "b"):
        with pytest.raises(StorageError, match=f"cannot write {wrong}: "):
            require_writable(wrong)


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    write_bytes(target, b"old")

    def fail_half_way() -> None:
        with atomic_writer(target) as stream:
            stream.write(b"half of the new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("write", [write_each, write_both])
def test_a_file_is_on_disk_before_it_gets_its_name_and_its_name_is_before_the_end(tmp_path, monkeypatch, write):
    """By the calls: what a loss of power leaves is not to be seen here."""
    calls = []

    def flushed(descriptor: int) -> None:
        calls.append(("flush", Path(f"/proc/self/fd/{descriptor}").resolve().name))
        REAL_FSYNC(descriptor)

    def named(old: str, new: Path) -> None:
        calls.append(("name", Path(old).name, Path(new).name))
        REAL_REPLACE(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", named)
    write(tmp_path / "a", tmp_path / "b")
    for place, (what, *names) in enumerate(calls):
        if what == "name":
            assert ("flush", names[0]) in calls[:place]
            assert ("flush", tmp_path.name) in calls[place:]
    assert [names[1] for what, *names in calls if what == "name"] == ["a", "b"]


def test_several_files_come_back_and_nothing_else(tmp_path):
    contents = {tmp_path / f"{n % 2}" / f"{n}.bin": bytes([n]) * n for n in range(50)}
    write_files(contents)
    found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == contents
    write_bytes(tmp_path / "alone", b"")
    assert len({path.stat().st_mode for path in [*contents, tmp_path / "alone"]}) == 1


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("at", [1, 7, 20])
def test_of_several_files_each_is_whole_or_absent_when_one_fails(tmp_path, monkeypatch, function, at):
    calls, original = itertools.count(1), getattr(os, function)

    def full(*arguments: object) -> object:
        if next(calls) == at:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(os, function, full)
    with pytest.raises(StorageError, match=r"cannot write .*bin: No space left on device"):
        write_files({tmp_path / f"{n}.bin": b"content" for n in range(20)})
    assert all(path.read_bytes() == b"content" for path in tmp_path.iterdir())
    left = len(list(tmp_path.iterdir()))
    assert left == at - 1 if function == "replace" else left < 20
    assert not list(tmp_path.glob(".*"))


def test_several_files_of_a_directory_that_cannot_be_are_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*file/0.bin: "):
        write_files({tmp_path / "file" / "0.bin": b""})


def test_a_file_is_invisible_until_it_is_whole(tmp_path):
    with atomic_writer(tmp_path / "a.txt") as stream:
        stream.write(b"new")
        assert not (tmp_path / "a.txt").exists()
    assert (tmp_path / "a.txt").read_text() == "new"


def test_nan_is_not_written_to_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not (tmp_path / "a.json").exists()


def test_errors_name_the_file(tmp_path):
    (tmp_path / "bad.json").write_text('{"x": ')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "file").write_text("")
    for attempt, name in [
        (lambda: read_json(tmp_path / "bad.json"), "bad.json is not valid JSON"),
        (lambda: read_json(tmp_path / "deep.json"), "deep.json is not valid JSON"),
        (lambda: read_json(tmp_path / "none.json"), "none.json: No such file"),
        (
            lambda: read_tensors(tmp_path / "bad.safetensors"),
            "bad.safetensors is not a whole safetensors file",
        ),
        (lambda: read_tensors(tmp_path / "none.safetensors"), "none.safetensors"),
        (lambda: write_bytes(tmp_path / "file" / "x", b""), "cannot write"),
    ]:
        with pytest.raises(StorageError, match=name):
            attempt()


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_never_taken_for_tensors(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"x\.safetensors"):
        read_tensors(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="not a whole safetensors file"):
        read_tensors(path)


def test_a_directory_is_held_by_one_holder_at_a_time(tmp_path):
    """Locks tell open files apart, so that a second holder in this process stands for one in another."""
    run = tmp_path / "run"
    with directory_lock(run), pytest.raises(StorageError, match="is in use by another process"), directory_lock(run):
        pass
    with directory_lock(run):
        pass


@pytest.mark.parametrize("read", [read_json, read_tensors])
def test_devices_and_pipes_are_refused_without_being_opened(tmp_path, read):
    """A link to a device has no end, a pipe that nobody fills has no beginning."""
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("zero", "pipe"):
        with pytest.raises(StorageError, match=rf"cannot read .*{name}: it is a device or a pipe"):
            read(tmp_path / name)


def test_a_lock_ends_with_a_killed_process_and_stops_no_reader(tmp_path):
    script = f"import time; from optcov.storage import claim\nwith claim({str(tmp_path / 'x.lock')!r}) as held:\n"
    script += "    print(held, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        with claim(tmp_path / "x.lock") as held:
            assert not held
        assert (tmp_path / "x.lock").read_bytes() == b""
        holder.kill()
        with claim(tmp_path / "x.lock", wait=True) as held:
            assert held


def test_a_lock_that_was_taken_in_one_thread_ends_where_another_one_closes_it(tmp_path):
    held = claim(tmp_path / "x.lock")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(held.__enter__).result()
        held.__exit__(None, None, None)
        with claim(tmp_path / "x.lock") as again:
            assert again


def test_a_lock_that_cannot_be_made_names_its_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot use .*file: "), directory_lock(tmp_path / "file"):
        pass


def test_no_module_needs_a_module_of_posix_to_be_imported():
    """Windows has none of these, and the package says that it runs there."""
    posix = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
    for path in Path(storage.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not posix & {name.split(".")[0] for name in names}, path
