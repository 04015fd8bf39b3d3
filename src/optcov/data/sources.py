"""Where images come from: one name or path, recognised by what lies there."""

from __future__ import annotations

from pathlib import Path

from optcov.data.idx import is_idx_directory, load_idx
from optcov.data.images import DataError, ImageSet

SPLITS = ("train", "test")


def load(source: str | Path, split: str = "train") -> ImageSet:
    """Load one split of a source of images.

    source: a directory with idx files.
    """
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    path = Path(source)
    if path.is_dir() and is_idx_directory(path):
        return load_idx(path, split)
    raise DataError(f"{source} is not a source of images")
