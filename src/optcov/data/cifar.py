"""CIFAR-10 as published: binary batches (a label and 3,072 bytes an image), and Python batches: pickles.

A pickle is a program. Here it can build plain containers, and name the parts of a numpy array, for which it gets a
record of what it would have called; everything else is refused. Its instructions are looked through before.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.data.images import DataError, ImageSet
from optcov.storage import reading

SHAPE = (3, 32, 32)
RECORD = 1 + math.prod(SHAPE)
MAX_BATCH_BYTES = 2**26  # a published batch has 31 MB
MAX_INSTRUCTIONS = 2**20  # of a pickle, and places of its memory; a published batch has 50,000
MAX_TUPLES = 20  # of a pickle, which could hold each other; a published batch has 5
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
FOLDERS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}


def find_batches(directory: Path, split: str) -> list[Path] | None:
    """Find the batch files of a split in a directory or its published sub-directory; binary ones first."""
    for suffix, folder in FOLDERS.items():
        for base in (Path(directory), Path(directory) / folder):
            paths = [base / f"{name}{suffix}" for name in BATCHES[split]]
            if all(path.is_file() for path in paths):
                return paths
    return None


def load_cifar(paths: list[Path], split: str) -> ImageSet:
    """Load batches, binary or Python ones: images (n, 3, 32, 32) and labels."""
    parts = [read_binary(path) if path.suffix == ".bin" else read_python(path) for path in paths]
    images, labels = (torch.cat(list(group)) for group in zip(*parts, strict=True))
    return ImageSet(images, labels, f"cifar10 ({split})")


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Read a binary batch."""
    content = _content(path)
    if not content or len(content) % RECORD:
        raise DataError(f"{path} has {len(content)} bytes, no multiple of the {RECORD} of an image; fetch it again")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    return records[:, 1:].reshape(-1, *SHAPE).contiguous(), records[:, 0].long()


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    """Read a Python batch; no function that it names is called."""
    content = _content(path)
    try:
        _look_through(content)
        batch = _Reader(io.BytesIO(content), encoding="bytes").load()
        data, labels = (batch[key] if key in batch else batch[key.decode()] for key in (b"data", b"labels"))
        if type(labels) is not list or not all(type(label) is int and 0 <= label < 10 for label in labels):
            raise ValueError("its labels are not numbers from 0 to 9")
        pixels = data.bytes_of((len(labels), math.prod(SHAPE)))
    except DataError:
        raise
    except (
        pickle.UnpicklingError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        EOFError,
    ) as error:
        raise DataError(
            f"{path} is not a CIFAR-10 batch ({type(error).__name__}: {error}); use the binary version of CIFAR-10"
        ) from error
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, *SHAPE), torch.tensor(labels)


def _content(path: Path) -> bytes:
    with reading(path, DataError):
        if path.stat().st_size > MAX_BATCH_BYTES:
            raise DataError(f"{path} is larger than {MAX_BATCH_BYTES} bytes, which no batch of CIFAR-10 is")
        return path.read_bytes()


class _Called:
    """What a pickle would call a function of numpy with, and the state that it would set; nothing is called."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes_of(self, shape: tuple[int, int]) -> bytes:
        """The bytes of a numpy array of uint8 in C order, if this is one of that shape."""
        _, found, dtype, fortran, content = self.state
        if (found, fortran) != (shape, False) or type(content) is not bytes or len(content) != math.prod(shape):
            raise ValueError(f"its data is not an array of shape {shape}")
        if dtype.arguments[0] not in (b"u1", "u1"):
            raise ValueError("its data is not of 8-bit numbers")
        return content


class _Reader(pickle.Unpickler):
    """Knows the names that an array is pickled by, and no others."""

    def find_class(self, module: str, name: str) -> type[_Called]:
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return _Called
        raise ValueError(f"it names {f'{module} {name}'!r}, which has no place in it")


def _look_through(content: bytes) -> None:
    """Refuse instructions by which a small pickle could take much memory or time, or break Python itself."""
    tuples = 0
    for count, (opcode, argument, position) in enumerate(pickletools.genops(content)):
        place = int(argument or 0) if "PUT" in opcode.name else 0  # pickle sets aside all places below it
        tuples += opcode.name.startswith("TUPLE")  # their hash goes through all that they hold, to any depth
        if opcode.proto > 3 or tuples > MAX_TUPLES or max(count, place) > MAX_INSTRUCTIONS:
            raise ValueError(f"the instruction {opcode.name} at byte {position} has no place in it")
