"""Labels and captions of a folder of images, by the convention of `datasets`' imagefolder.

metadata.csv or metadata.jsonl    a row per image: file_name, and label (a whole number, or a name) or text (a caption)
a sub-folder per class            the folder's name is the class

Classes that have names are numbered from 0 in the order of their names.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.data.images import DataError
from optcov.storage import StorageError, parse_json, read_text, require_small

METADATA = ("metadata.csv", "metadata.jsonl")
COLUMNS = ("label", "class_label", "class")
CAPTIONS = ("text", "caption")
MAX_BYTES = 2**28
LARGEST = 2**31

Label = int | str


def folder_labels(directory: Path, files: Sequence[Path], parts: Mapping[Path, Sequence[Path]]) -> Tensor | None:
    """Labels of the files of a directory, int64 (n,); None where nothing tells them.

    parts: files by directory of all parts of the data, such as train and test, whose classes are numbered together.
    """
    own = _labels_of(directory, files)
    if own is None:
        return None
    if all(isinstance(label, int) for label in own):
        return torch.tensor(own, dtype=torch.int64)
    others = [_labels_of(part, found) or [] for part, found in parts.items() if part != directory]
    names = sorted({str(label) for labels in (own, *others) for label in labels})
    if len(names) < 2:
        return None
    number = {name: index for index, name in enumerate(names)}
    return torch.tensor([number[str(label)] for label in own], dtype=torch.int64)


def _labels_of(directory: Path, files: Sequence[Path]) -> list[Label] | None:
    found = _metadata(directory, COLUMNS)
    if found is not None:
        return _from_rows(*found, [path.relative_to(directory) for path in files])
    folders = [path.relative_to(directory).parts[:-1] for path in files]
    return [parts[0] for parts in folders] if folders and all(folders) else None


def folder_captions(directory: Path, files: Sequence[Path]) -> tuple[str, ...] | None:
    """Captions of the files of a directory, from the column text (or caption) of its metadata; None without one."""
    metadata = _metadata(directory, CAPTIONS)
    if metadata is None:
        return None
    path, rows, column = metadata
    found = [rows.get(file.relative_to(directory).as_posix(), {}).get(column) for file in files]
    missing = [file for file, text in zip(files, found, strict=True) if not isinstance(text, str)]
    if missing:
        raise DataError(f"{path} has no {column} for {missing[0].name}; add a row, or remove the image")
    return tuple(str(text) for text in found)


def _metadata(directory: Path, columns: Sequence[str]) -> tuple[Path, dict[str, dict[str, Any]], str] | None:
    """The first file of metadata with one of the columns, its rows by file, and that column; None without one."""
    for path in (directory / name for name in METADATA):
        rows = read_metadata(path) if path.is_file() else {}
        column = next((column for column in columns if any(column in row for row in rows.values())), None)
        if column is not None:
            return path, rows, column
    return None


def read_metadata(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of metadata.csv or metadata.jsonl by the name of their file."""
    require_small(path, MAX_BYTES, DataError)
    try:
        text = read_text(path).removeprefix("\ufeff")  # which spreadsheets put first
        rows = (
            list(csv.DictReader(io.StringIO(text)))
            if path.suffix == ".csv"
            else [parse_json(line) for line in text.splitlines() if line.strip()]
        )
    except (csv.Error, StorageError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from error
    found: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}: row {number} has no file_name, which says which image it is about")
        found[Path(name).as_posix()] = row
    return found


def _from_rows(path: Path, rows: Mapping[str, Mapping[str, Any]], column: str, files: Sequence[Path]) -> list[Label]:
    found = []
    for file in files:
        row = rows.get(file.as_posix())
        if row is None or row.get(column) in (None, ""):
            raise DataError(f"{path} has no {column} for {file}; add a row, or remove the image")
        found.append(row[column])
    if all(_is_number(label) for label in found):
        return [int(label) for label in found]
    if not all(isinstance(label, str) for label in found):
        raise DataError(f"{path}: a {column} is neither a whole number nor a name; use one of them for all images")
    return found


def _is_number(label: Any) -> bool:
    if isinstance(label, str):
        digits = label.strip().removeprefix("-")
        return digits.isascii() and digits.isdigit() and len(digits) < 10
    return type(label) is int and abs(label) < LARGEST
