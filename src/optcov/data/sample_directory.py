"""A directory of drawn images that can be filled in several runs, none repeated and none left out.

    run.json       what the images are: method, steps, seed, ...; another run into the same directory must agree.
                   Written with the first image, so that a run that fails before leaves the directory free
    images/        000000.png, ... (format "png")
    shards/        images-000000-000063.npz, ... (format "npz")

An image counts as done when its file, or a shard with its number, is there and whole; others are drawn again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, final, overload

import numpy as np
import torch
from torch import Tensor

from optcov import storage
from optcov.data.arrays import declared_shape, read_npz
from optcov.data.export import png_bytes
from optcov.data.folders import read_image
from optcov.data.images import DataError
from optcov.data.png import png_damage
from optcov.identity import check_unchanged

FORMATS = ("png", "npz")
_PNG = re.compile(r"(\d{6,})\.png")
_SHARD = re.compile(r"images-(\d{6,})-(\d{6,})\.npz")


@final
class SampleDirectory:
    """Drawn images on disk; indices are the numbers of the images in the run."""

    def __init__(self, path: Path, settings: Mapping[str, Any], file_format: str = "png"):
        if file_format not in FORMATS:
            raise DataError(f"unknown format {file_format!r}; choose one of {', '.join(FORMATS)}")
        self.path, self.format = Path(path), file_format
        self._settings = {**settings, "format": file_format}
        self._check_agreement()

    def missing(self, count: int) -> Numbers:
        """Numbers of the first `count` images that are not there yet, or whose file is damaged."""
        gaps, start = [], 0
        for first, last in sorted(self._done()):
            gaps.append(range(start, min(first, count)))
            start = max(start, last + 1)
        return Numbers([*gaps, range(start, count)])

    def save(self, images: Tensor, indices: Sequence[int]) -> None:
        """Write 8-bit images (n, C, H, W) under their numbers; a shard holds a run of consecutive ones."""
        if not (self.path / "run.json").exists():
            storage.write_json(self.path / "run.json", self._settings)
        if self.format == "png":
            names = (self.path / "images" / f"{index:06d}.png" for index in indices)
            storage.write_files({name: png_bytes(image) for name, image in zip(names, images, strict=True)})
            return
        for first, last in _runs(indices):
            start = indices.index(first)
            pixels = images[start : start + last - first + 1].cpu().numpy()
            with storage.atomic_writer(self.path / "shards" / f"images-{first:06d}-{last:06d}.npz") as stream:
                np.savez_compressed(stream, images=pixels)

    def first(self, count: int) -> Tensor:
        """Read the first `count` images back, 8-bit (count, C, H, W)."""
        if self.format == "png":
            files = [self.path / "images" / f"{i:06d}.png" for i in range(count)]
            drawn = [torch.from_numpy(read_image(file)) for file in files]
            for file, image in zip(files, drawn, strict=True):
                if image.shape != drawn[0].shape:
                    raise DataError(
                        f"{file} has the shape {tuple(image.shape)}, but {files[0].name} has {tuple(drawn[0].shape)}; "
                        f"remove what is not of this run, to draw it again"
                    )
            return torch.stack(drawn)
        found: dict[int, Tensor] = {}
        for shard in sorted((self.path / "shards").glob("*.npz")):
            match = _SHARD.fullmatch(shard.name)
            if match and int(match[1]) < count and _shard_is_whole(shard, int(match[2]) - int(match[1]) + 1):
                images = read_npz(shard).get("images")
                if images is None or images.ndim != 4 or images.dtype != np.uint8:
                    raise DataError(f"{shard} holds no 8-bit images (n, C, H, W); remove it to draw them again")
                found.update(enumerate(torch.from_numpy(images), start=int(match[1])))
        try:
            return torch.stack([found[index] for index in range(count)])
        except (KeyError, RuntimeError) as error:
            raise DataError(f"the shards in {self.path} lack images, or differ in shape: {error}") from error

    def _check_agreement(self) -> None:
        file, settings = self.path / "run.json", self._settings
        if not file.exists():
            if self._done():
                raise DataError(f"{self.path} holds images of an unknown run (no run.json); choose another directory")
            return
        before = storage.read_json(file)
        if not isinstance(before, dict):
            raise DataError(f"{file} does not describe a run; choose another directory")
        check_unchanged(before, settings, self.path, DataError, ignore=("bundle",))  # whose name changes no image

    def _done(self) -> list[tuple[int, int]]:
        """First and last number of each file that is whole."""
        if self.format == "png":
            names = {file: _PNG.fullmatch(file.name) for file in (self.path / "images").glob("*.png")}
            return [(int(name[1]), int(name[1])) for file, name in names.items() if name and _png_is_whole(file)]
        shards = {file: _SHARD.fullmatch(file.name) for file in (self.path / "shards").glob("*.npz")}
        spans = {file: (int(name[1]), int(name[2])) for file, name in shards.items() if name}
        return [span for file, span in spans.items() if _shard_is_whole(file, span[1] - span[0] + 1)]


@final
class Numbers(Sequence[int]):
    """Ascending numbers as ranges: as many as one likes, without a list of them."""

    def __init__(self, ranges: Sequence[range]):
        self._ranges = [part for part in ranges if len(part)]

    def __len__(self) -> int:
        return sum(map(len, self._ranges))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Numbers: ...
    def __getitem__(self, index: int | slice) -> int | Numbers:
        if not isinstance(index, slice):
            wanted = range(len(self))[index]
            return next(iter(self[wanted : wanted + 1]))
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"numbers are taken one after the other, not by steps of {step}")
        found, before = [], 0
        for part in self._ranges:
            found.append(part[max(start - before, 0) : max(stop - before, 0)])
            before += len(part)
        return Numbers(found)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._ranges)


def _png_is_whole(path: Path) -> bool:
    try:
        return png_damage(path.read_bytes()) is None
    except OSError:
        return False


def _shard_is_whole(path: Path, images: int) -> bool:
    """Whether a shard declares as many images as its name does, and holds them."""
    shape = declared_shape(path, "images")
    if shape is None or shape[:1] != (images,):
        return False
    try:
        return "images" in read_npz(path)  # which knows a damaged content by its checksum
    except DataError:
        return False


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Split ascending numbers into runs of consecutive ones: (first, last)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs
