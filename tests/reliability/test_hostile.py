"""Hostile input at the command line: whatever is in a file or an option, one sentence that names it, and exit code 2.

Readers of single formats have hostile tests of their own (test_data_hostile, test_bundle_hostile,
test_checkpoints_files, test_storage). Here whole commands meet damaged files, and runs meet damaged state of their own.
The long suite runs the same tests with more examples.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from command_line import CommandLine
from image_files import idx_bytes, random_images
from optcov import ForwardProcess, ReverseProcess, Schedule, oracle, storage
from optcov.data.sample_directory import SampleDirectory
from optcov.experiments.tables.cells import Cell, CellStore
from optcov.fitting.checkpoint import Checkpoint, CheckpointStore
from optcov.fitting.journal import Journal
from optcov.likelihood import Sweep
from small_bundles import small_bundle


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    )


@pytest.fixture
def optcov(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle and images of every kind; each example damages one file and puts it back."""
    directory = tmp_path_factory.mktemp("hostile")
    small_bundle(Schedule.linear(24)).save(directory / "bundle")
    images = random_images(12, 4, 4)
    np.savez_compressed(directory / "images.npz", images=images.numpy())
    np.save(directory / "images.npy", images.numpy())
    for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", images[:, 0, 0])):
        (directory / "idx").mkdir(exist_ok=True)
        (directory / "idx" / name).write_bytes(idx_bytes(content))
    (directory / "png").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image.numpy()).save(directory / "png" / f"{number}.png")
    weights = {"down.0.weight": torch.ones(4, 3), "down.0.bias": torch.zeros(4)}
    torch.save(weights, directory / "weights.pth")
    storage.write_tensors(directory / "weights.safetensors", weights)
    return directory


TARGETS = {  # file to damage -> the command that reads it
    "images.npz": ("train", "images.npz"),
    "images.npy": ("train", "images.npy"),
    "idx/train-images-idx3-ubyte": ("train", "idx"),
    "png/1.png": ("train", "png"),
    "weights.pth": ("import", "weights.pth"),
    "weights.safetensors": ("import", "weights.safetensors"),
    "bundle/config.json": ("info", "bundle"),
    "bundle/unet/config.json": ("info", "bundle"),
    "bundle/unet/diffusion_pytorch_model.safetensors": ("info", "bundle"),
    "bundle/heads/sn.safetensors": ("info", "bundle"),
    "bundle/numbers.safetensors": ("info", "bundle"),
    "bundle/trajectories.json": ("info", "bundle"),
}


def damage(data: st.DataObject, content: bytes) -> bytes:
    damaged = bytearray(content)
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "number", "swap"]))
    position = data.draw(st.integers(0, min(len(content) - 1, 4000)))
    if kind == "cut":
        del damaged[position:]
    elif kind == "flip":
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "insert":
        damaged[position:position] = data.draw(st.binary(min_size=1, max_size=16))
    elif kind == "number":
        huge = data.draw(st.sampled_from([b"\xff\xff\xff\x7f", b"\xff" * 8, b"99999999", b"NaN ", b"1e999"]))
        damaged[position : position + len(huge)] = huge
    else:
        other = data.draw(st.sampled_from([b"", b"{}", b"[" * 3000, b"\x00" * 64, b"PK\x03\x04", b"null"]))
        damaged = bytearray(other)
    return bytes(damaged)


def meets_a_damaged_file(place: Path, optcov: CommandLine, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TARGETS)))
    command, argument = TARGETS[name]
    path, out = place / name, place / "out"
    original = path.read_bytes()
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p != path}
    path.write_bytes(damage(data, original))
    try:
        more = () if command == "info" else ("--out", out)
        said = optcov(command, place / argument, *more)
        assert said.code in (0, 2), said.err
        assert "Traceback" not in said.err
        if said.code == 2:
            sentences = [line for line in said.err.splitlines() if line.startswith("error: ")]
            assert len(sentences) == 1, said.err
            assert str(place / argument) in sentences[0]
            assert not [p for p in out.rglob("*") if p.name != ".lock"]
    finally:
        path.write_bytes(original)
        shutil.rmtree(out, ignore_errors=True)
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*") if p != path}.keys() == before.keys()


@fuzz(80)
@given(data=st.data())
def test_a_command_meets_a_damaged_file(place, optcov, data):
    meets_a_damaged_file(place, optcov, data)


@pytest.mark.long
@fuzz(1200)
@given(data=st.data())
def test_a_command_meets_many_damaged_files(place, optcov, data):
    meets_a_damaged_file(place, optcov, data)


# state that a run finds of an earlier one


def state_of_training(directory: Path) -> tuple[Path, Callable[[], object]]:
    store = CheckpointStore(directory / "checkpoints", keep=2)
    weights = {"a": torch.ones(3)}
    store.save(Checkpoint(7, weights, weights, {"a/step": torch.tensor(7.0)}, {"seed": 0}, (7, 0.5)))
    return store.path(7), store.latest


def state_of_a_sweep(directory: Path) -> tuple[Path, Callable[[], object]]:
    data = oracle.GaussianMixture([1.0], [[0.0, 0.0]], [0.25])
    schedule = Schedule.linear(100)
    process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), data_range=None)
    path = directory / "sweep.safetensors"

    def sweep() -> list[object]:
        return list(Sweep(process, data.sample(2), ["npr"], times=[50, 100], state=path, last_variances=["paper"]))

    sweep()
    return path, sweep


def state_of_a_table(directory: Path) -> tuple[Path, Callable[[], object]]:
    store, cell = CellStore(directory, "cost"), Cell("cost", {"batch": 10}, 1.0, "a cell")
    store.put(cell, {"value": 1.5}, 0.1)
    return store.path, lambda: store.get(cell)


def state_of_measured_numbers(directory: Path) -> tuple[Path, Callable[[], object]]:
    path = directory / "numbers.jsonl"
    Journal(path, {"seed": 0}).append({"time": 1.0})
    return path, lambda: Journal(path, {"seed": 0}).read()


def state_of_samples(directory: Path) -> tuple[Path, Callable[[], object]]:
    samples = SampleDirectory(directory, {"seed": 0}, "npz")
    samples.save(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [0, 1])
    return next((directory / "shards").glob("*.npz")), lambda: samples.first(2)


def state_of_a_sampling_run(directory: Path) -> tuple[Path, Callable[[], object]]:
    SampleDirectory(directory, {"seed": 0}).save(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), [0])
    return directory / "run.json", lambda: SampleDirectory(directory, {"seed": 0})


STATES = (
    state_of_training,
    state_of_a_sweep,
    state_of_a_table,
    state_of_measured_numbers,
    state_of_samples,
    state_of_a_sampling_run,
)


def meets_its_damaged_state(directory: Path, data: st.DataObject) -> None:
    make = data.draw(st.sampled_from(STATES))
    where = directory / make.__name__
    shutil.rmtree(where, ignore_errors=True)
    path, read = make(where)
    path.write_bytes(damage(data, path.read_bytes()))
    message = None
    try:
        read()
    except ValueError as error:
        message = str(error)
    assert message is None or str(where) in message, message


@fuzz(60)
@given(data=st.data())
def test_a_run_meets_damaged_state_of_its_own(tmp_path, data):
    meets_its_damaged_state(tmp_path, data)


@pytest.mark.long
@fuzz(600)
@given(data=st.data())
def test_a_run_meets_much_damaged_state_of_its_own(tmp_path, data):
    meets_its_damaged_state(tmp_path, data)


# options

STRANGE = st.one_of(
    st.sampled_from(
        ["", "nan", "inf", "-inf", "-1", "0", "1e999", "9" * 40, "../../etc/passwd", "a\nb", "\x1b[2J", "☃"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12).filter(lambda text: text[:1] != "-"),
)
OPTIONS = ("--method", "--steps", "--n", "--seed", "--trajectory", "--schedule", "--batch-size", "--format")
OPTIONS += ("--noise-cap", "--last-step", "--tolerance")


def meets_a_strange_option(place: Path, optcov: CommandLine, data: st.DataObject) -> None:
    option, value = data.draw(st.sampled_from(OPTIONS)), data.draw(STRANGE)
    if option in ("--n", "--batch-size") and value.strip().lstrip("+").replace("_", "").isdigit():
        value = f"-{value}"  # a large number of images is no mistake, only slow
    out = place / "out"
    usual = ("--method", "NPR-DDIM", "--steps", 2, "--n", 1, "--out", out)
    said = optcov("sample", place / "bundle", *usual, f"{option}={value}")
    assert said.code in (0, 2), said.err
    assert "Traceback" not in said.err
    assert "\x1b[2J" not in said.err
    if said.code == 2:
        assert not [p for p in out.rglob("*") if p.name != ".lock"]
    shutil.rmtree(out, ignore_errors=True)


@fuzz(50)
@given(data=st.data())
def test_a_command_meets_a_strange_option(place, optcov, data):
    meets_a_strange_option(place, optcov, data)


@pytest.mark.long
@fuzz(500)
@given(data=st.data())
def test_a_command_meets_many_strange_options(place, optcov, data):
    meets_a_strange_option(place, optcov, data)


# a corpus


def png_that_claims(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (1, 1)).save(buffer, "PNG")
    content = bytearray(buffer.getvalue())
    content[16:24] = struct.pack(">II", width, height)
    import zlib

    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    return bytes(content)


def npz_with_names(*names: str) -> bytes:
    array, buffer = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros((2, 4, 4), np.float32))
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, array.getvalue())
    return buffer.getvalue()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


CORPUS: dict[str, tuple[str, bytes, str]] = {  # name: (file, content, what the error says)
    "an image of ten thousand million pixels": ("x/a.png", png_that_claims(100_000, 100_000), "pixels"),
    "names that climb out of an archive": ("x.npz", npz_with_names("../../evil.npy", "/tmp/evil.npy"), "no images"),
    "numbers that are none": ("x.npy", npy(np.full((2, 4, 4), np.nan, np.float32)), "8-bit"),
    "numbers without end": ("x.npy", npy(np.full((2, 4, 4), np.inf, np.float32)), "8-bit"),
    "no images": ("x.npy", npy(np.zeros((0, 4, 4), np.uint8)), ""),
    "one number": ("x.npy", npy(np.zeros((), np.uint8)), ""),
    "a name of two lines that steers the terminal": ("two\nlines\x1b[2J.npy", b"rubbish", "two\\nlines\\x1b[2J.npy"),
    "an empty file": ("x.npz", b"", "x.npz"),
}


@pytest.mark.parametrize("case", sorted(CORPUS))
def test_a_corpus_of_bad_data_is_refused_in_one_sentence(tmp_path, optcov, case):
    name, content, words = CORPUS[case]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    said = optcov("train", path.parent if path.parent != tmp_path else path, "--out", tmp_path / "out")
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert words in said.err
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.relative_to(tmp_path).parts[0]]


@pytest.mark.parametrize("name", ["config.json", "trajectories.json", "unet/config.json", "provenance.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "NaN", "1e999", '"\\ud800"'])
def test_json_that_is_deep_or_strange_is_refused_in_one_sentence(place, optcov, tmp_path, name, content):
    copy = Path(shutil.copytree(place / "bundle", tmp_path / "bundle"))
    (copy / name).write_text(content)
    said = optcov("info", copy)
    assert said.code == 2, said.out
    assert len(said.err.splitlines()) == 1
    assert name in said.err


def test_state_of_another_kind_is_refused_though_it_is_whole(tmp_path):
    """A safetensors file that is fine in itself, in the place of a state."""
    for make in (state_of_training, state_of_a_sweep):
        path, read = make(tmp_path / make.__name__)
        for metadata in ({}, {"state": "[]", "settings": "[]"}, {"state": "[" * 5000, "settings": json.dumps("x")}):
            storage.write_tensors(path, {"other.weight": torch.ones(2)}, metadata)
            with pytest.raises(ValueError, match=path.name):
                read()


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")],
    ids=["python", "torch"],
)
def test_too_little_memory_is_one_sentence(place, optcov, tmp_path, error):
    with mock.patch("optcov.bundle.load", side_effect=error):
        said = optcov("sample", place / "bundle", "--out", tmp_path / "out")
    assert said.code == 2
    assert said.err.startswith("error: there is not enough memory for this; use a smaller batch")
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
