"""What is wrong with a foreign file, in one printable sentence that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from optcov.storage import StorageError
from optcov.text_table import printable

_PREFIX = "cannot import "


@final
class CheckpointError(ValueError):
    """A foreign file that cannot be imported, with the reason."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name in front of what is wrong with it, unless a name is there already."""
    try:
        yield
    except (CheckpointError, StorageError) as error:
        if str(error).startswith(_PREFIX):
            raise
        raise CheckpointError(printable(f"{_PREFIX}{path}: {error}")) from error
    except OSError as error:
        raise CheckpointError(printable(f"{_PREFIX}{path}: {error.strerror or error}")) from error
