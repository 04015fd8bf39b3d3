"""Sets of 8-bit images in memory, and the exact conversion between 8 bits and [-1, 1].

    x = b / 127.5 - 1,    b = round(127.5 (x + 1))

The 256 levels are 2/255 apart, so float32 converts them there and back without any change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor


class DataError(ValueError):
    """Images cannot be read or used. The message names the file and says why."""


def require_memory(needed: int, name: str) -> None:
    """Refuse data that does not fit into memory, before any is allocated.

    On systems that do not tell their free memory, nothing is refused.
    """
    status = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if found and needed > int(found[1]) * 1024:
        raise DataError(
            f"{name} needs {needed / 1e9:.1f} GB of memory, but {int(found[1]) * 1024 / 1e9:.1f} GB are free; "
            f"use fewer or smaller images"
        )


@final
@dataclass(frozen=True)
class ImageSet:
    """Images of one size, with labels if the source has them.

    >>> images = ImageSet(torch.zeros(10, 1, 4, 4, dtype=torch.uint8), name="black")
    >>> len(images), images.shape
    (10, (1, 4, 4))
    >>> images.x_0(slice(0, 2)).unique().tolist()
    [-1.0]
    """

    images: Tensor  # uint8, (n, C, H, W)
    labels: Tensor | None = None  # int64, (n,)
    name: str = "images"
    captions: tuple[str, ...] | None = None  # a text for each image

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                f"{self.name}: images must be a uint8 tensor (n, C, H, W), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}; convert images in [-1, 1] by data.to_8bit"
            )
        if 0 in self.images.shape:
            raise DataError(f"{self.name} holds no images: its shape is {tuple(self.images.shape)}")
        if self.labels is not None and self.labels.shape != (len(self.images),):
            raise DataError(f"{self.name} has {len(self.images)} images but labels of shape {tuple(self.labels.shape)}")
        check_captions(self.captions, len(self.images), self.name)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def x_0(self, index: slice | Tensor | None = None) -> Tensor:
        """Images in [-1, 1], float32 (m, C, H, W): those at the index, or all."""
        return from_8bit(self.images if index is None else self.images[index])

    def select(self, index: slice | Tensor, name: str | None = None) -> ImageSet:
        """Some of the images, as a set."""
        labels = None if self.labels is None else self.labels[index]
        captions = select_captions(self.captions, index)
        return ImageSet(self.images[index], labels, name or self.name, captions)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Images in [-1, 1] in order, float32 (size, C, H, W); the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.x_0(slice(start, start + size))

    def split(self, test_share: float, seed: int = 0) -> tuple[ImageSet, ImageSet]:
        """Train and test parts, by a permutation that depends on the number of images and the seed alone."""
        count = round(len(self) * test_share)
        if not 0 < count < len(self):
            raise DataError(
                f"a test share of {test_share} of {len(self)} images leaves {count} for testing and "
                f"{len(self) - count} for training; give more images, or a share that leaves both"
            )
        train, test = split_indices(len(self), count, seed)
        return self.select(train, f"{self.name} (train)"), self.select(test, f"{self.name} (test)")

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the shape and the pixels, in hexadecimal, without labels."""
        digest = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for start in range(0, len(self), 4096):
            digest.update(self.images[start : start + 4096].contiguous().numpy().tobytes())
        return digest.hexdigest()


def check_captions(captions: tuple[str, ...] | None, count: int, name: str) -> None:
    """Refuse captions that are not one text for each data point."""
    if captions is None:
        return
    if len(captions) != count:
        raise DataError(f"{name} has {count} images but {len(captions)} captions; give one for each")
    if not all(isinstance(caption, str) for caption in captions):
        raise DataError(f"{name} has captions that are no texts; give strings")


def select_captions(captions: tuple[str, ...] | None, index: slice | Tensor) -> tuple[str, ...] | None:
    """Some of the captions."""
    if captions is None:
        return None
    if isinstance(index, slice):
        return captions[index]
    numbers = torch.arange(len(captions))[index.cpu()]
    return tuple(captions[number] for number in numbers.tolist())


def split_indices(total: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """The kept and the held-out positions of `total` data points, each in ascending order."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values


def from_8bit(images: Tensor) -> Tensor:
    """Convert bytes to [-1, 1], float32."""
    if images.dtype != torch.uint8:
        raise DataError(f"8-bit images are uint8 tensors, got {images.dtype}")
    return images.float() / 127.5 - 1


def to_8bit(images: Tensor) -> Tensor:
    """Convert images in [-1, 1] to the nearest bytes. Values outside are clipped; NaN is refused."""
    if not images.is_floating_point():
        raise DataError(f"images in [-1, 1] are floating-point tensors, got {images.dtype}")
    levels = (images.float() + 1) * 127.5
    if bool(levels.isnan().any()):
        raise DataError("an image holds NaN, which no byte can express; check the sampler that made it")
    return levels.round().clamp(0, 255).to(torch.uint8)


def flip_half(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mirror each image (B, C, H, W) left to right with probability 1/2."""
    chosen = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(chosen.to(images.device)[:, None, None, None], images.flip(-1), images)
