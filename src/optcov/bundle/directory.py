"""A directory that appears whole or not at all, also in the place of an older one."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optcov.bundle.errors import BundleError
from optcov.storage import StorageError, current_umask, sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_directory(target: Path, known: frozenset[str]) -> Iterator[Path]:
    """Give a temporary directory that takes the target's name when the block ends without an error.

    An existing target is replaced only if it holds nothing but entries of the known names.
    """
    target = Path(target)
    check_replaceable(target, known)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".part"))
    except OSError as error:
        raise BundleError(f"cannot write {target}: {error.strerror}") from error
    try:
        with _held(scratch):
            yield scratch
            scratch.chmod(0o777 & ~current_umask())
            _sync_tree(scratch)
            _put_in_place(scratch, target)
            sync_directory(target.parent)
    except OSError as error:
        raise BundleError(f"cannot write {target}: {error.strerror or error}") from error
    except StorageError as error:  # names the file by where it is for a moment
        raise BundleError(str(error).replace(str(scratch), str(target))) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # after an exchange, this is the old one


def check_replaceable(target: Path, known: frozenset[str]) -> None:
    """Raise a BundleError if a directory cannot take the target's name without the loss of something else."""
    if not os.path.lexists(target):
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
    for path in target.parent.glob(f".{glob.escape(target.name[:100])}.*.part"):
        if path.is_dir() and not path.is_symlink():
            with _held(path) as abandoned:
                if abandoned:
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Try to hold a directory: yields whether this process got it. Ends with the process, also a killed one."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        os.close(descriptor)


def _put_in_place(scratch: Path, target: Path) -> None:
    """Rename; an existing target is exchanged in one step where the system can, else moved aside first."""
    if not target.exists() or not any(target.iterdir()):
        os.rename(scratch, target)
    elif not _exchange(scratch, target):
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".old"))
        os.rename(target, aside)
        os.rename(scratch, target)
        os.rename(aside, scratch)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories in one step (Linux); tell whether that worked."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return bool(rename(*arguments) == 0)


def _sync_tree(directory: Path) -> None:
    """Flush the directories; storage has flushed the files."""
    for path, _, _ in os.walk(directory, topdown=False):
        sync_directory(Path(path))
