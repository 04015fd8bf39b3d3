"""Files that are complete or absent: atomic writes, locks, and reading errors that name the file.

The package writes all its files here. It writes to a temporary name beside the target, flushes to disk, then renames.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

MAX_NAME = 255  # bytes of one part of a path
MAX_DIGITS = 300  # of a whole number: any float64 has fewer
FLUSHES = 16  # how many files are flushed to disk side by side
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.part")


class StorageError(ValueError):
    """A file cannot be read or written. The message names it and says why."""


def as_path(path: object, error_type: Callable[[str], Exception] = StorageError) -> Path:
    """Return a path, or raise an error that names what is none."""
    if not isinstance(path, str | os.PathLike) or not str(path).strip() or "\0" in str(path):
        raise error_type(f"{path!r:.80} is not a path; pass the name of a file or a directory")
    found = Path(path)
    if any(len(os.fsencode(part)) > MAX_NAME for part in found.parts):
        raise error_type(f"{path!r:.80} is too long for the name of a file; choose a shorter one")
    return found


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only if the block ends without an error."""
    path = Path(path)
    with _writing(path):
        descriptor, name = _temporary(path)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                _flush(stream)
            os.chmod(name, 0o666 & ~current_umask())
            os.replace(name, path)
            sync_directory(path.parent)
        finally:
            Path(name).unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Let errors of the system name the file that is written."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def _flush(stream: IO[Any]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _temporary(path: Path) -> tuple[int, str]:
    """Open a file under a temporary name beside its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before long work."""
    path = Path(path)
    if path.is_dir():
        raise StorageError(f"cannot write {path}: it is a directory")
    with _writing(path):
        descriptor, name = _temporary(path)
        os.close(descriptor)
        os.unlink(name)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file at once or not at all."""
    with atomic_writer(path) as stream:
        stream.write(content)


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write several files, each completely or not at all. They get their names when all of them are on disk.

    They are flushed in parallel, and renamed together. File systems join this to a few writes of their journal. For
    many small files, each takes a tenth of the time that it would take alone.
    """
    permissions = 0o666 & ~current_umask()  # asked for here: the question changes it for the whole process
    temporary: list[str] = []  # as they are made: an interrupt may come at any moment
    pool = ThreadPoolExecutor(FLUSHES)
    try:
        flushed = {
            Path(path): pool.submit(_write_temporary, Path(path), content, permissions, temporary)
            for path, content in contents.items()
        }
        wait(flushed.values())
        for path, name in flushed.items():
            with _writing(path):
                os.replace(name.result(), path)
        for directory in {path.parent for path in flushed}:
            with _writing(directory):
                sync_directory(directory)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # threads that still write would do so after the cleanup
        for left in temporary:
            Path(left).unlink(missing_ok=True)


def _write_temporary(path: Path, content: bytes, permissions: int, made: list[str]) -> str:
    """Write and flush a file under a temporary name beside its place, which is added to those made and returned."""
    descriptor, name = _temporary(path)
    made.append(name)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        _flush(stream)
    os.chmod(name, permissions)
    return name


def write_json(path: Path, content: Any) -> None:
    """Write JSON, indented, at once or not at all; NaN is refused."""
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def append_line(path: Path, line: str) -> None:
    """Add a line to a file and flush it to disk. A crash in the middle leaves an incomplete last line."""
    with _writing(path), Path(path).open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
        _flush(stream)


def parse_json(text: str) -> Any:
    """Parse JSON. Whole numbers beyond the range of a float are refused; a ValueError says what is wrong."""
    return json.loads(text, parse_int=_whole_number)


def _whole_number(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > MAX_DIGITS:
        raise ValueError(f"it holds a number of {digits} digits")
    return int(text)


@contextmanager
def reading(path: Path, error_type: Callable[[str], Exception] = StorageError) -> Iterator[None]:
    """Make errors of the operating system name the file that is read."""
    try:
        yield
    except OSError as error:
        raise error_type(f"cannot read {path}: {error.strerror or error}") from error


def require_small(path: Path, most: int, error_type: Callable[[str], Exception] = StorageError) -> None:
    """Refuse a file with more bytes than such a file can have."""
    with reading(path, error_type):
        size = path.stat().st_size
    if size > most:
        raise error_type(f"{path} has {size} bytes; at most {most} are read")


def read_text(path: Path) -> str:
    """Read text."""
    _refuse_devices(path)
    try:
        with reading(path):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(f"{path} is not a text: {error}") from error


def read_json(path: Path) -> Any:
    """Read JSON."""
    text = read_text(path)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not valid JSON: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors as safetensors, at once or not at all."""
    # cloned: safetensors refuses tensors that share memory
    contiguous = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    content = memoryview(safetensors.torch.save(contiguous, dict(metadata or {})))
    size = int.from_bytes(content[:8], "little")
    with atomic_writer(path) as stream:
        stream.write(_sorted_header(bytes(content[8 : 8 + size])))
        stream.write(content[8 + size :])


def _sorted_header(header: bytes) -> bytes:
    """A safetensors header with its length before it; its metadata by name, which the library leaves to chance."""
    entries = json.loads(header)
    entries["__metadata__"] = dict(sorted(entries.get("__metadata__", {}).items()))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors behind it stay aligned
    return len(text).to_bytes(8, "little") + text


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata."""
    _refuse_devices(path)
    try:
        with reading(path), safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise StorageError(f"{path} is not a whole safetensors file: {error}") from error


def _refuse_devices(path: Path) -> None:
    """Refuse what would be read without end: a pipe that nobody fills, or a device, perhaps by a link."""
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise StorageError(f"cannot read {path}: it is a device or a pipe, not a file")


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold a directory for one process; a second process is refused at once.

    The lock ends with the process, even if it is killed.
    """
    with claim(Path(directory) / ".lock") as held:
        if not held:
            raise StorageError(f"{directory} is in use by another process; wait for it, or choose another directory")
        remove_leftovers(Path(directory), (".*.part", "*/.*.part"))
        yield


def remove_leftovers(directory: Path, patterns: Sequence[str]) -> None:
    """Remove temporary files of killed runs from a directory that this process holds."""
    for pattern in patterns:
        for path in directory.glob(pattern):
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)


@contextmanager
def claim(path: Path, wait: bool = False) -> Iterator[bool]:
    """Try to hold a lock file, and yield whether it succeeded. The lock ends with the process, even if it is killed.

    wait: wait until another process releases it.
    """
    path = Path(path)
    # thread_local: a run may be drained in one thread and closed in another
    lock = FileLock(path, timeout=-1 if wait else 0, thread_local=False)
    held = True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        held = False
    except OSError as error:
        raise StorageError(f"cannot use {path.parent}: {error.strerror}") from error
    try:
        yield held
    finally:
        lock.release()


def current_umask() -> int:
    """The permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to disk, where the system opens directories (Windows does not)."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
