"""Data from strangers: whatever the bytes, the answer is a DataError that names the file, in bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import memory_bounds
from image_files import cifar_batch, idx_bytes, python_batch, random_images
from optcov import data
from optcov.data import DataError
from optcov.data.arrays import load_npz, read_npy, read_npz
from optcov.data.cifar import read_binary, read_python
from optcov.data.folders import read_image
from optcov.data.idx import read_idx

MEGABYTE = 2**20


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def npy_claim(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape!r}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode("latin-1")


def npz_bytes() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, train=random_images(3, 4, 4).numpy(), train_labels=np.arange(3))
    return buffer.getvalue()


def png_bytes() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(random_images(6, 5).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg_bytes() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(random_images(16, 16).numpy()).save(buffer, "JPEG")
    return buffer.getvalue()


READERS: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "x-ubyte": (idx_bytes(random_images(3, 4, 4)), read_idx),
    "x-ubyte.gz": (gzip.compress(idx_bytes(random_images(3, 4, 4)), mtime=0), read_idx),
    "x.npy": (npy_bytes(random_images(3, 4, 4).numpy()), read_npy),
    "x.npz": (npz_bytes(), lambda path: load_npz(path, "train")),
    "x.png": (png_bytes(), read_image),
    "x.jpg": (jpeg_bytes(), read_image),
    "x.bin": (bytes([1]) + bytes(3072), read_binary),
    "batch": (python_batch(*cifar_batch(1, 0)), read_python),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def answer(path: Path, content: bytes, read: Callable[[Path], object]) -> None:
    """Reading ends well, or with a DataError that names the file."""
    path.write_bytes(content)
    try:
        read(path)
    except DataError as error:
        message = str(error)
    else:
        return
    assert str(path) in message


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_end_in_an_error_that_names_them(directory: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(READERS)))
    content, read = READERS[name]
    damaged = bytearray(content)
    position = data.draw(st.integers(0, min(len(content) - 1, 1000)))
    kind = data.draw(st.sampled_from(["cut", "flip", "insert", "number"]))
    if kind == "cut":
        del damaged[position:]
    elif kind == "flip":
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "insert":
        damaged[position:position] = data.draw(st.binary(min_size=1, max_size=8))
    else:
        damaged[position : position + 4] = b"\xff\xff\xff\x7f"
    with memory_below(64 * MEGABYTE):
        answer(directory / name, bytes(damaged), read)


def test_a_header_of_an_array_that_declares_gigabytes_costs_none(directory: Path) -> None:
    content, read = READERS["x.npy"]
    later = bytearray(content)
    later[6] = 2  # a version whose headers have 4 bytes of length, here 662 million
    with memory_below(64 * MEGABYTE):
        answer(directory / "x.npy", bytes(later), read)


@settings(max_examples=80)
@given(name=st.sampled_from(sorted(READERS)), content=st.binary(max_size=64))
def test_random_bytes_end_in_an_error_that_names_the_file(directory: Path, name: str, content: bytes) -> None:
    answer(directory / name, content, READERS[name][1])


@settings(max_examples=80)
@given(program=st.lists(st.sampled_from([bytes([b]) for b in b"}]()NKtRb0aesuq.\x85\x86\x87\x89"]), max_size=12))
def test_any_program_in_a_pickle_is_followed_or_refused_but_never_run(directory: Path, program: list[bytes]) -> None:
    answer(directory / "program", b"\x80\x02" + b"".join(program) + b".", read_python)


PICKLES = {
    "a place far off": b"Nr\xff\xff\xff\x7f0}",
    "a place far off, in words": b"Np2147483647\n0}",
    "a bytearray of 16 GB": b"\x96" + struct.pack("<Q", 2**34) + b"0}",
    "tuples within tuples as a key": b"}N" + b"\x85" * 10**6 + b"Ns",
    "pairs of pairs as a key": b"}N" + b"q\x00h\x00\x86" * 60 + b"Ns",
    "lists without end": b"]" * 2 * 10**6,
    "an array of a terabyte": b"}cnumpy\nndarray\n\x8a\x06" + (10**12).to_bytes(6, "little") + b"\x85R0",
    "a bytearray by name": b"}cbuiltins\nbytearray\n\x8a\x06" + (10**12).to_bytes(6, "little") + b"\x85R0",
    "a state for a name": b"}cnumpy\ndtype\nNb0",
    "a dictionary of labels": b"}(U\x04datacnumpy\ndtype\n)RU\x06labels}K\x01Nsu",
}


@pytest.mark.parametrize("attack", PICKLES)
def test_a_batch_without_code_cannot_take_memory_or_time_either(tmp_path: Path, attack: str) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02" + PICKLES[attack] + b".")
    with memory_bounds.memory_below(200), pytest.raises(DataError, match="batch is not a CIFAR-10 batch"):
        read_python(path)


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_that_claims_gigabytes_gets_no_memory(tmp_path: Path, packed: bool) -> None:
    content = b"\0\0\x08\x03" + struct.pack(">III", 60_000, 2**15, 2**15) + bytes(100)
    path = tmp_path / "x-ubyte"
    path.write_bytes(gzip.compress(content) if packed else content)
    with memory_below(MEGABYTE), pytest.raises(DataError, match="more than it can hold"):
        read_idx(path)


def test_an_idx_file_with_bytes_to_spare_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x-ubyte"
    path.write_bytes(idx_bytes(random_images(2, 3, 3)) + b"x")
    with pytest.raises(DataError, match="more than the 18 bytes"):
        read_idx(path)


@pytest.mark.parametrize("shape", [(10**6, 10**6), (2**62, 2**62), (-5, 3), (10**30,)])
def test_a_npy_file_that_claims_gigabytes_gets_no_memory(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(npy_claim(shape) + bytes(100))
    with memory_below(MEGABYTE), pytest.raises(DataError, match=r"x\.npy"):
        read_npy(path)


def test_a_zip_bomb_gets_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", npy_claim((64 * MEGABYTE, 1000)) + bytes(10 * MEGABYTE))
    with memory_below(MEGABYTE), pytest.raises(DataError, match="declares 67108864000 bytes"):
        read_npz(path)


def test_a_false_size_in_a_zip_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lie.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", npy_claim((2**30, 3)) + bytes(1000))
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 2**31)
    path.write_bytes(bytes(content))
    with memory_below(MEGABYTE), pytest.raises(DataError, match="which cannot be true"):
        read_npz(path)


@pytest.mark.parametrize("descr", ["|O", "<U10", "|V8", "<M8[ns]", "<c16"])
def test_only_numbers_are_read(tmp_path: Path, descr: str) -> None:
    (tmp_path / "x.npy").write_bytes(npy_claim((1,), descr) + bytes(100))
    with pytest.raises(DataError, match=r"not numbers|not a npy array"):
        read_npy(tmp_path / "x.npy")


def test_names_with_newlines_are_read_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines.npy"
    path.write_bytes(b"rubbish")
    with pytest.raises(DataError, match="not a npy array"):
        read_npy(path)
    good = tmp_path / "two\nlines-ubyte"
    good.write_bytes(idx_bytes(torch.zeros(2, 2, 2, dtype=torch.uint8)))
    assert read_idx(good).shape == (2, 2, 2)


# memory


def test_a_set_that_is_larger_than_the_free_memory_is_refused_before_any_is_taken(tmp_path: Path) -> None:
    """4,096 links to one image of 16 million pixels: 50 kB on disk, 69 GB in memory."""
    folder = tmp_path / "many"
    folder.mkdir()
    Image.new("L", (4096, 4096)).save(folder / "0.png")
    for number in range(1, 4096):
        (folder / f"{number}.png").symlink_to(folder / "0.png")
    free = mock.patch.object(Path, "read_text", return_value="MemFree: 9 kB\nMemAvailable:  8000000 kB\n")
    with free, pytest.raises(DataError, match=r"many needs 68.7 GB of memory, but 8.2 GB are free"):
        data.load(folder)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "folder"])
def test_a_limit_on_memory_ends_in_an_error_that_names_the_source(tmp_path: Path, name: str) -> None:
    images = np.zeros((4, 16, 16), np.uint8)
    if name == "folder":
        (tmp_path / name).mkdir()
        for number, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / name / f"{number}.png")
    else:
        (np.save if name == "a.npy" else np.savez_compressed)(tmp_path / name, images)
    full = [mock.patch(f"numpy.{function}", side_effect=MemoryError) for function in ("load", "empty")]
    with full[0], full[1], pytest.raises(DataError, match=rf"{name} does not fit into the memory"):
        data.load(tmp_path / name)


def test_a_pipe_among_images_is_refused_without_being_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png: it is a device or a pipe"):
        data.load(tmp_path)
