"""A directory of drawn images that can be filled in several runs, none repeated and none left out.

    run.json       what the images are: method, steps, seed, ...; another run into the same directory must agree.
                   Written with the first image, so that a run that fails before leaves the directory free
    images/        000000.png, ... (format "png")
    shards/        images-000000-000063.npz, ... (format "npz")

An image counts as done when its file, or a shard with its number, is there; files appear only when whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from optcov import storage
from optcov.data.arrays import read_npz
from optcov.data.export import png_bytes
from optcov.data.folders import read_image
from optcov.data.images import DataError
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

    def missing(self, count: int) -> list[int]:
        """Numbers of the first `count` images that are not there yet."""
        done = self._done()
        return [index for index in range(count) if index not in done]

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
            return torch.stack(
                [torch.from_numpy(read_image(self.path / "images" / f"{i:06d}.png")) for i in range(count)]
            )
        found: dict[int, Tensor] = {}
        for shard in sorted((self.path / "shards").glob("*.npz")):
            match = _SHARD.fullmatch(shard.name)
            if match and int(match[1]) < count:
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

    def _done(self) -> set[int]:
        if self.format == "png":
            names = (_PNG.fullmatch(file.name) for file in (self.path / "images").glob("*.png"))
            return {int(name[1]) for name in names if name}
        shards = (_SHARD.fullmatch(file.name) for file in (self.path / "shards").glob("*.npz"))
        return {index for name in shards if name for index in range(int(name[1]), int(name[2]) + 1)}


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Split ascending numbers into runs of consecutive ones: (first, last)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs
