"""CIFAR-10 as published: binary batches (a label and 3,072 bytes an image), and Python batches: pickles.

A pickle is a program. It is never run here: `_Interpreter` follows the few instructions that build a dictionary
of an array, integers and strings, imports nothing, calls nothing, and refuses every other instruction.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.data.images import DataError, ImageSet

SHAPE = (3, 32, 32)
RECORD = 1 + math.prod(SHAPE)
MAX_BATCH_BYTES = 2**26  # a published batch has 31 MB
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
    """Read a Python batch without unpickling it."""
    try:
        batch = _Interpreter().run(_content(path))
        images, labels = batch[b"data"], batch[b"labels"]
        pixels = images.bytes_of((len(labels), math.prod(SHAPE)))
        if not all(type(label) is int and 0 <= label < 10 for label in labels):
            raise ValueError("its labels are not numbers from 0 to 9")
    except DataError:
        raise
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        UnicodeError,
        OverflowError,
    ) as error:
        raise DataError(
            f"{path} is not a CIFAR-10 batch ({type(error).__name__}: {error}); use the binary version of CIFAR-10"
        ) from error
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, *SHAPE), torch.tensor(labels)


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BATCH_BYTES:
            raise DataError(f"{path} is larger than {MAX_BATCH_BYTES} bytes, which no batch of CIFAR-10 is")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


@dataclass
class _Symbol:
    """The name of a class or function in a pickle, which stays a name."""

    name: str


@dataclass
class _Construction:
    """What a pickle would call, and with what; nothing is called."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None

    def bytes_of(self, shape: tuple[int, int]) -> bytes:
        """The bytes of a numpy array of uint8 in C order, if this constructs one of that shape."""
        _, found, dtype, fortran, content = self.state
        if (self.function, found, fortran) != (_RECONSTRUCT, shape, False) or type(content) is not bytes:
            raise ValueError(f"its data is not an array of shape {shape}")
        if dtype.function != "numpy dtype" or dtype.arguments[0] not in (b"u1", "u1"):
            raise ValueError("its data is not of 8-bit numbers")
        if len(content) != math.prod(shape):
            raise ValueError(f"its data has {len(content)} bytes, not those of shape {shape}")
        return content


_RECONSTRUCT = "numpy.core.multiarray _reconstruct"
_SYMBOLS = {_RECONSTRUCT, "numpy ndarray", "numpy dtype"}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES",
    "BINUNICODE", "SHORT_BINUNICODE",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


class _Interpreter:
    """Follows the instructions of protocol 2 that build plain containers; see the module's docstring."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.actions: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "MARK": lambda _: self.stack.append(_MARK),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "TUPLE": lambda _: self.stack.append(tuple(self._since_mark())),
            "APPEND": lambda _: self._append([self.stack.pop()]),
            "APPENDS": lambda _: self._append(self._since_mark()),
            "SETITEM": lambda _: self._set_items(self._take(2)),
            "SETITEMS": lambda _: self._set_items(self._since_mark()),
            "GLOBAL": self._name,
            "REDUCE": lambda _: self._construct(*self._take(2)),
            "BUILD": lambda _: self._build(self.stack.pop()),
        }

    def run(self, content: bytes) -> dict[Any, Any]:
        """Follow the instructions to the end and return the dictionary they build, with bytes as its keys."""
        for opcode, argument, position in pickletools.genops(content):
            if opcode.name == "STOP":
                break
            self._follow(opcode.name, argument, position or 0)
        (result,) = self.stack
        if type(result) is not dict:
            raise ValueError("it is not a dictionary")
        return {key.encode("latin-1") if type(key) is str else key: value for key, value in result.items()}

    def _follow(self, name: str, argument: Any, position: int) -> None:
        if name in _LITERALS:
            self.stack.append(argument.encode("latin-1") if "STRING" in name else argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(tuple(self._take(_TUPLES[name])))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in self.actions:
            self.actions[name](argument)
        else:
            raise ValueError(f"the instruction {name} at byte {position} has no place in it")

    def _take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it takes more from its stack than is there")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def _since_mark(self) -> list[Any]:
        taken = []
        while (value := self.stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]

    def _append(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to what is not a list")
        self.stack[-1].extend(values)

    def _set_items(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise ValueError("it sets items of what is not a dictionary")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def _name(self, name: str) -> None:
        if name not in _SYMBOLS:
            raise ValueError(f"it names {name!r}, which has no place in it")
        self.stack.append(_Symbol(name))

    def _construct(self, function: Any, arguments: Any) -> None:
        if type(function) is not _Symbol or type(arguments) is not tuple:
            raise ValueError("it calls what is not a name")
        self.stack.append(_Construction(function.name, arguments))

    def _build(self, state: Any) -> None:
        if type(self.stack[-1]) is not _Construction or type(state) is not tuple:
            raise ValueError("it sets the state of what is not an array")
        self.stack[-1].state = state
