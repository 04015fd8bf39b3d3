"""Reading foreign files as data only: tensors and plain containers, never code, no more than the file has.

A torch file is a pickle with tensors beside it. It is read by torch.load(weights_only=True), which refuses
every name that is not a tensor's, and its tensors are mapped rather than copied, so that a file which claims
more than it holds fails before memory is spent on it.
"""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.checkpoints.arrays import STAND_INS, StoredArray
from optcov.checkpoints.errors import CheckpointError
from optcov.storage import read_tensors

TRAINING_OUTPUT = Path("ema_models_states", "model.pth")  # inside the directory that the authors' training writes
MAX_DEPTH = 20
MAX_ENTRIES = 10**5  # of all containers; one that holds another many times over counts every time
HEADROOM = 2**29  # bytes for what reading needs beside the tensors
_STATUS = Path("/proc/self/statm")
_DATA_PAGES = 5  # field of the status: pages of data, which RLIMIT_DATA counts


def read_file(path: Path) -> Any:
    """Read a torch or safetensors file, or the directory of a training run: tensors in plain containers.

    Arrays of numpy come as tensors. No tensor is larger than the file; several may share their numbers.
    """
    path = weights_file(Path(path))
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError("the file is empty")
    try:
        with limited_growth(HEADROOM + 2 * size):
            content = read_tensors(path)[0] if path.suffix == ".safetensors" else _read_torch(path)
            content = _plain(content, count())
    except MemoryError as error:
        raise CheckpointError(f"reading it takes more memory than a file of {size:,} bytes can need") from error
    for tensor in _tensors(content):
        odd = tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided
        if odd or tensor.device.type != "cpu":
            raise CheckpointError(f"it holds {tensor.dtype}, {tensor.layout}, on {tensor.device}, not plain numbers")
        check_size([tensor], size)
    return content


def weights_file(path: Path) -> Path:
    """The file with the weights: the path itself, or that inside the directory of a training run."""
    if path.is_dir():
        if not (path / TRAINING_OUTPUT).is_file():
            raise CheckpointError(
                f"the directory has neither {TRAINING_OUTPUT} of a training run nor a config.json or "
                f"model_index.json of diffusers; pass the file with the weights"
            )
        return path / TRAINING_OUTPUT
    if not path.is_file():
        raise CheckpointError("it is no regular file" if path.exists() else "there is no such file")
    return path


def check_size(tensors: Iterable[Tensor], size: int) -> None:
    """Refuse tensors that together claim more than the file has bytes for, by repeating or sharing their numbers."""
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if claimed > size:
        raise CheckpointError(f"its tensors claim {claimed:,} bytes, but the file has {size:,}")


def _read_torch(path: Path) -> Any:
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError("its name is not UTF-8, and torch opens no such file; rename it") from error
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
    if mapped:
        _check_zip(path)
    try:
        with torch.serialization.safe_globals(STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it then refuses
            # files of before torch 1.6 are not archives and cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (MemoryError, CheckpointError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(str(error))) from error
    # whatever else goes wrong on damaged bytes: they decide which operation torch tries, so also how it fails
    except Exception as error:
        raise CheckpointError(
            f"this is not a whole torch file ({type(error).__name__}: {_first_sentence(error)})"
        ) from error


def _check_zip(path: Path) -> None:
    """Torch stores without compression, so that whatever unpacks to more than the file is not a checkpoint.

    It does not compare checksums when it maps a file; a weight with one bit turned would go unnoticed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            too_large = sum(record.file_size for record in records) > path.stat().st_size
            damaged = None if compressed or too_large else archive.testzip()
    # zipfile's readers fail in as many ways as there are fields
    except Exception as error:
        raise CheckpointError(f"the archive is damaged ({_first_sentence(error)})") from error
    if compressed or too_large:
        raise CheckpointError("the archive is compressed or claims more than it holds, which torch files never do")
    if damaged is not None:
        raise CheckpointError(f"the archive is damaged ({damaged[:200]} does not have its checksum)")


def _refusal(message: str) -> str:
    marker = "GLOBAL "
    if marker in message:
        name = (message.split(marker, 1)[1].split() or ["nothing"])[0][:200]
        return (
            f"it asks to run {name}, and only tensors are read from foreign files; "
            f"if you trust it, save its state_dict alone and import that"
        )
    return "this is not a torch file of tensors"


def _first_sentence(error: Exception) -> str:
    return (str(error).splitlines() or ["no more is known"])[0].split(". ")[0][:200]


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _tensors(value)


def _plain(content: Any, entries: Iterator[int], depth: int = 0) -> Any:
    """Dictionaries, lists, tensors and scalars only; stored arrays become tensors."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"it is nested more than {MAX_DEPTH} deep")
    if next(entries) > MAX_ENTRIES:
        raise CheckpointError(f"it holds more than {MAX_ENTRIES:,} entries, which no checkpoint does")
    if isinstance(content, StoredArray):
        return content.tensor()
    if isinstance(content, Tensor):
        return content.detach()
    if isinstance(content, dict):
        return {key: _plain(value, entries, depth + 1) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value, entries, depth + 1) for value in content]
    return content


@contextmanager
def limited_growth(extra: int) -> Iterator[None]:
    """Let this process grow by so many bytes; beyond, an allocation fails instead of filling the machine.

    Even a pickle of nothing but tensors can ask for any amount: it may call bytearray, or encode one string over
    and over. The limit is the whole process's, so reading is the only thing to do inside. Where the system does
    not tell how large the process is (other than Linux), there is no limit.
    """
    if not _STATUS.exists():
        yield
        return
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(_STATUS.read_text().split()[_DATA_PAGES]) * os.sysconf("SC_PAGE_SIZE")
    given = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([used + extra, *given]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
