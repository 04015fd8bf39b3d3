"""idx files, the format of the MNIST family: a magic number, sizes as big-endian integers, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from optcov.data.arrays import DEFLATE_RATIO
from optcov.data.images import DataError, ImageSet, require_memory

MAX_BYTES = 2**31  # of one file, unpacked: MNIST's largest has 47 MB
GZIP_MAGIC = b"\x1f\x8b"
UNSIGNED_BYTE = 8

_PREFIX = {"train": "train", "test": "t10k"}


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, plain or gzipped: uint8, of the shape that the file declares."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            shape = _read_shape(path, stream, path.stat().st_size * (DEFLATE_RATIO if packed else 1))
            count = math.prod(shape)
            require_memory(count, str(path))
            content = bytearray(stream.read(count))
            surplus = stream.read(1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) != count or surplus:
        found = "more than" if surplus else f"only {len(content)} of"
        raise DataError(f"{path} holds {found} the {count} bytes that it declares; fetch it again")
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape) if count else torch.empty(shape).byte()


def _read_shape(path: Path, stream: _Readable, most: int) -> tuple[int, ...]:
    """Read the header; most is what the file can hold, so that no memory is set aside for a false claim."""
    magic = stream.read(4)
    if len(magic) != 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTE or not 1 <= magic[3] <= 4:
        raise DataError(f"{path} is not an idx file of unsigned bytes: it starts with {magic.hex() or 'nothing'}")
    sizes = stream.read(4 * magic[3])
    if len(sizes) != 4 * magic[3]:
        raise DataError(f"{path} ends within its header; fetch it again")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if math.prod(shape) > min(most, MAX_BYTES):
        raise DataError(
            f"{path} declares {math.prod(shape)} bytes, shape {shape}, more than it can hold "
            f"or than the {MAX_BYTES} that are read at most"
        )
    return shape


def load_idx(directory: Path, split: str) -> ImageSet:
    """Load one split of a directory such as MNIST or Fashion-MNIST: images (n, 1, H, W) and labels (n,)."""
    images = read_idx(find_idx(directory, split, "images-idx3"))
    labels_path = find_idx(directory, split, "labels-idx1")
    labels = read_idx(labels_path)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{labels_path}: labels of shape {tuple(labels.shape)} do not go with images of shape {tuple(images.shape)}"
        )
    return ImageSet(images.unsqueeze(1), labels.long(), f"{Path(directory).name} ({split})")


def find_idx(directory: Path, split: str, part: str) -> Path:
    """Find e.g. train-images-idx3-ubyte, with or without .gz, also with a dot before idx."""
    stem = f"{_PREFIX[split]}-{part}-ubyte"
    for name in (stem, f"{stem}.gz", stem.replace("-idx", ".idx"), f"{stem.replace('-idx', '.idx')}.gz"):
        if (Path(directory) / name).is_file():
            return Path(directory) / name
    raise DataError(f"{directory} has no {stem} or {stem}.gz; fetch it by `optcov data fashion-mnist {directory}`")


def is_idx_directory(directory: Path) -> bool:
    """Tell whether a directory holds idx files."""
    return any(path.is_file() for pattern in ("*-ubyte", "*-ubyte.gz") for path in Path(directory).glob(pattern))
