"""npy and npz files read without trust: sizes are checked against the file before memory is set aside.

Pickled objects are refused, and so is an array that declares more than its file can hold (a zip bomb).
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from optcov.data.images import DataError, ImageSet, require_memory
from optcov.data.modes import CHUNK as IMAGES_AT_ONCE
from optcov.data.modes import over_white, say_converted
from optcov.storage import reading

Array = np.ndarray[Any, Any]

MAX_HEADER = 2**16  # bytes; numpy trusts headers of up to 10,000
MAX_BYTES = 2**34  # of one array: ImageNet 64x64 has 2**33.8
DEFLATE_RATIO = 1032  # the most that deflate can shrink anything
UNSPLIT_NAMES = ("images", "arr_0", "samples", "x", "data")

_BROKEN = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, OverflowError, SyntaxError, MemoryError, RuntimeError),
    *(struct.error, zlib.error, tokenize.TokenError),  # the last by numpy, which takes old headers apart
)


def read_npy(path: Path) -> Array:
    """Read a npy file of numbers."""
    path = Path(path)
    with reading(path, DataError), path.open("rb") as stream:
        return _read_array(stream, path.stat().st_size, str(path))


def read_npz(path: Path) -> dict[str, Array]:
    """Read all arrays of a npz file of numbers."""
    path = Path(path)
    try:
        archive = zipfile.ZipFile(path)
    except (*_BROKEN, zipfile.BadZipFile) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not a whole zip archive"
        raise DataError(f"cannot read {path}: {reason}") from error
    with archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        if not members:
            raise DataError(f"{path} holds no arrays")
        return {member.filename[:-4]: _read_member(archive, member, path) for member in members}


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Array:
    name = f"{path}[{member.filename[:-4]!r}]"
    if member.file_size > DEFLATE_RATIO * member.compress_size + 1024:
        raise DataError(f"{name} declares {member.file_size} bytes in {member.compress_size}, which cannot be true")
    try:
        with archive.open(member) as stream:
            return _read_array(stream, member.file_size, name)
    except (OSError, RuntimeError, EOFError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {name}: {error}") from error


def _read_array(stream: IO[bytes], size: int, name: str) -> Array:
    """Read header and content of a stream that holds `size` bytes."""
    try:
        shape, dtype = _read_header(stream)
    except _BROKEN as error:
        raise DataError(f"{name} is not a npy array: {' '.join(str(error).split())[:200]}") from error
    if dtype.kind not in "biuf":
        raise DataError(f"{name} holds {dtype}, not numbers; save it as a plain array (objects are never unpickled)")
    needed = math.prod(shape) * dtype.itemsize
    if not 0 <= needed <= min(size, MAX_BYTES):
        raise DataError(f"{name} declares {needed} bytes, shape {shape}, but holds fewer than that")
    require_memory(needed, name)
    try:
        stream.seek(0)
        array: Array = np.load(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError("there are more")
    except ValueError as error:
        raise DataError(f"{name} does not hold the {needed} bytes of shape {shape} that it declares") from error
    return array


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type that a npy array declares; raises what numpy raises."""
    start = io.BytesIO(stream.read(MAX_HEADER))  # of the stream itself, numpy would set aside any length it declares
    old = np.lib.format.read_magic(start) == (1, 0)
    shape, _, dtype = (np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0)(start)
    return shape, dtype


def declared_shape(path: Path, name: str) -> tuple[int, ...] | None:
    """The shape that an array of a npz file declares, without reading it; None if there is no such array."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
            return _read_header(stream)[0]
    except (*_BROKEN, zipfile.BadZipFile):
        return None


def load_npy(path: Path) -> ImageSet:
    """Load all images of a npy file."""
    return ImageSet(as_images(read_npy(path), str(path)), None, Path(path).name)


def load_npz(path: Path, split: str) -> tuple[ImageSet, bool]:
    """Load a split of a npz file, and tell whether the file has splits; without them, load all.

    A split is an array named e.g. train, x_train or train_images, with train_labels or y_train. A file that has only
    the other split has no images for this one: those were trained on.
    """
    arrays = read_npz(path)
    splits = {part: _first(arrays, _split_names(part)) for part in ("train", "test")}
    if any(splits.values()):
        found, label_names = splits[split], [f"{split}_labels", f"y_{split}"]
    else:
        found, label_names = _first(arrays, UNSPLIT_NAMES), ["labels", "arr_1", "y"]
        found = next(iter(arrays)) if found is None and len(arrays) == 1 else found
    if found is not None:
        own_split = splits[split] is not None
        name = f"{Path(path).name} ({split})" if own_split else Path(path).name
        images = as_images(arrays[found], f"{path}[{found!r}]")
        return ImageSet(images, _labels(arrays, label_names, path), name), own_split
    raise DataError(
        f"{path} holds {', '.join(map(repr, arrays))}, but no images under a known name; "
        f"name them {split!r}, or 'images' if there are no splits"
    )


def npz_splits(path: Path) -> list[str]:
    """Those of train and test that a npz file has; none of them if it is not divided."""
    arrays = read_npz(path)
    return [split for split in ("train", "test") if _first(arrays, _split_names(split)) is not None]


def _split_names(split: str) -> tuple[str, ...]:
    return split, f"x_{split}", f"{split}_images"


def _first(arrays: Mapping[str, Array], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in arrays), None)


def _labels(arrays: Mapping[str, Array], names: Sequence[str], path: Path) -> Tensor | None:
    name = _first(arrays, names)
    if name is None:
        return None
    if arrays[name].dtype.kind not in "biu":
        raise DataError(f"{path}[{name!r}]: labels must be integers, got {arrays[name].dtype}")
    return torch.from_numpy(arrays[name].astype(np.int64).reshape(-1))


def as_images(array: Array, name: str) -> Tensor:
    """Turn (n, H, W), (n, H, W, C) or (n, C, H, W) of bytes into (n, C, H, W), C = 1 or 3; RGBA goes on white."""
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise DataError(
            f"{name} must hold 8-bit images, (n, H, W), (n, H, W, C) or (n, C, H, W), "
            f"got {array.dtype} of shape {array.shape}; convert values from 0 to 255 by array.astype(np.uint8)"
        )
    if array.ndim == 3:
        array = array[:, None]
    array = _without_alpha(array, name)
    first, last = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
    if first == last:
        raise DataError(f"{name}: shape {array.shape} does not tell where the 1 or 3 channels are")
    return torch.from_numpy(np.ascontiguousarray(array if first else array.transpose(0, 3, 1, 2)))


def _without_alpha(array: Array, name: str) -> Array:
    """RGBA images (n, H, W, 4) or (n, 4, H, W) on white, others as they are."""
    sides = array.shape[1], array.shape[3]
    if 4 not in sides or sides == (4, 4) or {1, 3} & {*sides}:
        return array
    last = array if sides[1] == 4 else array.transpose(0, 2, 3, 1)
    say_converted(name, {"RGBA": len(array)})
    return np.concatenate(
        [over_white(last[i : i + IMAGES_AT_ONCE]) for i in range(0, len(last), IMAGES_AT_ONCE)] or [last[..., :3]]
    )
