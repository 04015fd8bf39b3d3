"""Image files as their publishers write them: idx, CIFAR-10's batches, folders, and a small published data set."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optcov.data import cifar, export, fetch


def random_images(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def idx_bytes(array: Tensor) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.numpy().tobytes()


def write_idx(directory: Path, packed: bool = True) -> dict[str, Tensor]:
    parts = {
        "train-images-idx3-ubyte": random_images(12, 5, 4),
        "train-labels-idx1-ubyte": torch.arange(12, dtype=torch.uint8),
        "t10k-images-idx3-ubyte": random_images(3, 5, 4, seed=1),
        "t10k-labels-idx1-ubyte": torch.arange(3, dtype=torch.uint8),
    }
    for name, array in parts.items():
        content = idx_bytes(array)
        (directory / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return parts


def write_folder(directory: Path, images: Tensor) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        export.write_png(directory / f"{number:03}.png", image)


def cifar_batch(count: int, seed: int) -> tuple[Tensor, list[int]]:
    return random_images(count, 3, 32, 32, seed=seed), [(seed + i) % 10 for i in range(count)]


def write_cifar(directory: Path, python: bool) -> dict[str, tuple[Tensor, list[int]]]:
    folder = directory / cifar.FOLDERS["" if python else ".bin"]
    folder.mkdir(parents=True)
    batches = {name: cifar_batch(4, seed) for seed, name in enumerate([*cifar.BATCHES["train"], "test_batch"])}
    for name, (images, labels) in batches.items():
        if python:
            (folder / name).write_bytes(python_batch(images, labels))
        else:
            records = torch.cat([torch.tensor(labels, dtype=torch.uint8)[:, None], images.flatten(1)], 1)
            (folder / f"{name}.bin").write_bytes(records.numpy().tobytes())
    return batches


def python_batch(images: Tensor, labels: list[int]) -> bytes:
    """A batch as Python 2 pickled it: protocol 2, byte strings, numpy's old module names."""

    def text(content: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(content)) + content

    def small(content: bytes) -> bytes:
        return b"U" + bytes([len(content)]) + content

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\nq\x05" + small(b"u1") + b"K\x00K\x01\x87Rq\x06"
    dtype += b"(K\x03" + small(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85" + small(b"b") + b"\x87Rq\x03"
    state = b"(K\x01(M" + struct.pack("<H", len(images)) + b"M\x00\x0ctq\x04" + dtype + b"\x89"
    array += state + text(images.numpy().tobytes()) + b"tb"
    items = small(b"data") + array + small(b"labels") + b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    items += small(b"batch_label") + small(b"training batch 1 of 5")
    return b"\x80\x02}q\x00(" + items + b"u."


def small_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Publish tiny idx files under the name fashion-mnist."""
    source = tmp_path / "published"
    source.mkdir()
    write_idx(source)
    files = tuple(
        fetch.RemoteFile(path.name, path.stat().st_size, hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest())
        for path in sorted(source.iterdir())
    )
    published = fetch.DataSet("fashion-mnist", f"file://{source}", "MIT", files)
    monkeypatch.setitem(fetch.DATA_SETS, "fashion-mnist", published)
    return source
