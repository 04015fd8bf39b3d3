"""A directory that appears whole or not at all, also in the place of an older one."""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optcov.bundle.errors import BundleError
from optcov.storage import StorageError, as_path, claim, sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RANDOM = 4  # bytes in a temporary name


@contextmanager
def atomic_directory(target: Path, known: frozenset[str]) -> Iterator[Path]:
    """Give a temporary directory that takes the target's name when the block ends without an error.

    An existing target is replaced only if it holds nothing but entries of the known names.
    """
    target = Path(target)
    check_replaceable(target, known)
    scratch = target.parent / f".{target.name[:100]}.{secrets.token_hex(_RANDOM)}.part"
    try:
        _remove_abandoned(target)
        with _held(scratch):
            scratch.mkdir()
            yield scratch
            for path, _, _ in os.walk(scratch, topdown=False):
                sync_directory(Path(path))  # storage has flushed the files
            _put_in_place(scratch, target)
            sync_directory(target.parent)
    except OSError as error:
        raise BundleError(f"cannot write {target}: {error.strerror or error}") from error
    except StorageError as error:  # names the file by where it is for a moment
        raise BundleError(str(error).replace(str(scratch), str(target))) from error


def check_replaceable(target: Path, known: frozenset[str]) -> None:
    """Raise a BundleError if a directory cannot take the target's name without the loss of something else."""
    if not os.path.lexists(target):
        parent = next(path for path in target.absolute().parents if os.path.lexists(path))
        if not parent.is_dir():
            raise BundleError(f"{target} cannot be a directory: {parent} is a file; choose another name")
        return
    if target.is_symlink() or not target.is_dir():
        raise BundleError(f"{target} exists and is no directory; choose another name")
    strange = sorted(entry.name for entry in target.iterdir() if entry.name not in known)
    if strange:
        raise BundleError(
            f"{target} holds {strange[0]!r}, which is no part of a bundle and would be lost; choose another directory"
        )


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes were writing in the target's place: those that live hold theirs."""
    letters = "[a-z0-9_]" * 2 * _RANDOM
    for path in target.parent.glob(f".{glob.escape(target.name[:100])}.{letters}.*"):
        if path.suffix in (".part", ".lock"):
            with _held(path.with_suffix(".part")):
                pass


@contextmanager
def _held(scratch: Path) -> Iterator[None]:
    """Try to hold a temporary directory, by a file beside it; who held it leaves neither. Ends with the process."""
    lock, held = scratch.with_suffix(".lock"), False
    try:
        with claim(lock) as held:
            yield
    finally:
        if held:
            shutil.rmtree(scratch, ignore_errors=True)  # after an exchange, this is the old one
            with suppress(OSError):  # Windows keeps a file that another process has just opened
                lock.unlink()


def _put_in_place(scratch: Path, target: Path) -> None:
    """Rename; an existing target is exchanged in one step where the system can, else moved aside first."""
    if not target.exists():
        os.rename(scratch, target)
    elif not _exchange(scratch, target):
        aside = scratch.with_suffix(".old")
        os.rename(target, aside)
        os.rename(scratch, target)
        os.rename(aside, scratch)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories in one step (Linux); tell whether that worked."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return bool(rename(*arguments) == 0)


def check_path(path: Any) -> Path:
    """Return a path, or raise an error that names what is none."""
    return as_path(path, BundleError)
