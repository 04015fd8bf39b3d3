"""Reading foreign files as data only: tensors and plain containers, never code, no more than the file has.

A torch file is a pickle with tensors beside it. It is read by torch.load(weights_only=True), which refuses
every name that is not a tensor's, and its tensors are mapped rather than copied, so that a file which claims
more than it holds fails before memory is spent on it.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.storage import StorageError, read_tensors

TRAINING_OUTPUT = Path("ema_models_states", "model.pth")  # inside the directory that the authors' training writes


@final
class CheckpointError(ValueError):
    """A foreign file that cannot be imported, with the reason."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of what is wrong with it."""
    try:
        yield
    except (CheckpointError, StorageError) as error:
        raise CheckpointError(f"cannot import {path}: {error}") from error


def read_file(path: Path) -> Any:
    """Read a torch or safetensors file, or the directory of a training run: tensors in plain containers.

    Arrays of numpy come as tensors.
    """
    path = _weights_file(Path(path))
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError("the file is empty")
    content = read_tensors(path)[0] if path.suffix == ".safetensors" else _read_torch(path)
    content = _plain(content)
    _check_size(content, size)
    return content


def _weights_file(path: Path) -> Path:
    if path.is_dir():
        if not (path / TRAINING_OUTPUT).is_file():
            raise CheckpointError(
                f"the directory has neither {TRAINING_OUTPUT} of a training run nor a config.json or "
                f"model_index.json of diffusers; pass the file with the weights"
            )
        return path / TRAINING_OUTPUT
    if not path.is_file():
        raise CheckpointError("there is no such file")
    return path


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
    if mapped:
        _check_zip(path)
    try:
        with torch.serialization.safe_globals(_STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it then refuses
            # files of before torch 1.6 are not archives and cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(str(error))) from error
    # whatever else goes wrong on damaged bytes: they decide which operation torch tries, so also how it fails
    except Exception as error:
        raise CheckpointError(
            f"this is not a whole torch file ({type(error).__name__}: {_first_sentence(error)})"
        ) from error


def _check_zip(path: Path) -> None:
    """Torch stores without compression; whatever unpacks to more than the file is not a checkpoint."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    # zipfile's readers fail in as many ways as there are fields
    except Exception as error:
        raise CheckpointError(f"the archive is damaged ({error})") from error
    compressed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
    if compressed or sum(record.file_size for record in records) > path.stat().st_size:
        raise CheckpointError("the archive is compressed or claims more than it holds, which torch files never do")


def _refusal(message: str) -> str:
    marker = "GLOBAL "
    if marker in message:
        name = message.split(marker, 1)[1].split()[0]
        return (
            f"it asks to run {name}, and only tensors are read from foreign files; "
            f"if you trust it, save its state_dict alone and import that"
        )
    return "this is not a torch file of tensors"


def _first_sentence(error: Exception) -> str:
    return (str(error).splitlines() or ["no more is known"])[0].split(". ")[0][:200]


def _check_size(content: Any, size: int) -> None:
    """Refuse tensors that claim more than the file has bytes for, by repeating or sharing their storage."""
    claimed = 0
    for tensor in _tensors(content):
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"it holds a {tensor.layout} tensor on {tensor.device}, not plain numbers")
        claimed += tensor.numel() * tensor.element_size()
    if claimed > size:
        raise CheckpointError(f"its tensors claim {claimed:,} bytes, but the file has {size:,}")


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, list):
        for value in content:
            yield from _tensors(value)


def _plain(content: Any, depth: int = 0) -> Any:
    """Dictionaries, lists, tensors and scalars only; stored arrays become tensors."""
    if depth > 20:
        raise CheckpointError("it is nested more than 20 deep")
    if isinstance(content, _StoredArray):
        return content.tensor()
    if isinstance(content, Tensor):
        return content.detach()
    if isinstance(content, dict):
        return {key: _plain(value, depth + 1) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value, depth + 1) for value in content]
    return content


@final
@dataclass
class _StoredType:
    """What a pickle says about the numbers of an array."""

    name: str = ""
    order: str = "<"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", "=", "|", ">"):
            self.order = state[1]
        else:
            raise CheckpointError("it holds an array of a structured type, not plain numbers")


@final
class _StoredArray:
    """A pickled numpy array as bytes: numpy's own unpickling would allocate whatever a file claims."""

    shape: tuple[int, ...] = ()
    kind: _StoredType = _StoredType()
    content: bytes = b""

    def __setstate__(self, state: Any) -> None:
        if not (isinstance(state, tuple) and len(state) == 5):
            raise CheckpointError("it holds an array that numpy did not write")
        _, self.shape, self.kind, _, self.content = state

    def tensor(self) -> Tensor:
        """The numbers, if they are floats in this machine's order."""
        dtype = {"f4": torch.float32, "f8": torch.float64}.get(getattr(self.kind, "name", ""))
        if dtype is None or self.kind.order == ">" or not isinstance(self.content, bytes):
            raise CheckpointError("it holds an array of something other than 32 or 64 bit floats")
        count = 1
        for length in self.shape:
            count *= length
        if count * dtype.itemsize != len(self.content) or not count:
            raise CheckpointError(f"an array of shape {self.shape} does not have {len(self.content)} bytes")
        return torch.frombuffer(bytearray(self.content), dtype=dtype).reshape(self.shape)


def _stored_array(*_: Any) -> _StoredArray:
    return _StoredArray()


def _stored_type(name: str, *_: Any) -> _StoredType:
    return _StoredType(str(name).lstrip("<=|"))


_STAND_INS: list[Any] = [
    _StoredType,
    (_StoredArray, "numpy.ndarray"),
    (_stored_type, "numpy.dtype"),
    (_stored_array, "numpy.core.multiarray._reconstruct"),
    (_stored_array, "numpy._core.multiarray._reconstruct"),
]
