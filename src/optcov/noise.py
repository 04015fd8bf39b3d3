"""Standard normal noise that depends on (seed, image, stream) alone.

It does not depend on the batch size, the number of processes or a restart, because each image has its own generator. It
is drawn on the CPU, so that it is the same on every device.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, final

import torch
from torch import Tensor

StepNoise = Callable[[float, float], Tensor]  # of the step from t to s, (B, *D)


def image_seed(seed: int, image: int, stream: int) -> int:
    """The 32-bit seed of an image's generator. torch's CPU generator uses only 32 bits of a seed.

    If all three were hashed into 32 bits, one run of 50,000 images in four would give two images the same noise. This
    seed is one-to-one in the image within a stream, for 2^32 images.
    """
    return _stream_seed(seed, stream) ^ _scrambled(image & 0xFFFFFFFF)


def image_generator(seed: int, image: int, stream: int) -> torch.Generator:
    """Return the generator of one image. A stream is a step of sampling, or a time of a sweep."""
    return torch.Generator().manual_seed(image_seed(seed, image, stream))


def batch_noise(
    seed: int, images: Sequence[int], stream: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Noise of several images, (len(images), *shape)."""
    noise = torch.empty((len(images), *shape), dtype=dtype)
    generator, stream_seed = torch.Generator(), _stream_seed(seed, stream)
    for row, image in zip(noise, images, strict=True):  # what image_generator draws, with no copy and one generator
        row.normal_(generator=generator.manual_seed(stream_seed ^ _scrambled(image & 0xFFFFFFFF)))
    return noise


def image_numbers(indices: Sequence[int] | None, count: int) -> Sequence[int]:
    """The number of each image of a batch; by default 0..count-1."""
    if indices is None:
        return range(count)
    if len(check_image_numbers(indices)) != count:
        raise ValueError(f"there are {len(indices)} image numbers for a batch of {count}; pass one per image")
    return indices


def check_image_numbers(indices: Any) -> Sequence[int]:
    """Return the numbers of images, or raise a ValueError that names them."""
    if not isinstance(indices, Sequence) or not all(isinstance(index, Integral) for index in indices):
        raise ValueError(f"indices = {indices!r:.80} is not a sequence of whole numbers; pass one per image")
    return indices


@final
class NoiseSource:
    """Noise of the steps of a batch, numbered from 1: by (seed, image, number), or supplied by the caller."""

    def __init__(
        self,
        shape: Sequence[int],
        seed: int,
        indices: Sequence[int] | None,
        supplied: StepNoise | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self._shape, self._seed, self._supplied = tuple(shape), seed, supplied
        self._dtype, self._device = dtype, device
        self._indices = image_numbers(indices, shape[0])

    def draw(self, number: int, t: float, s: float) -> Tensor:
        """Noise of the step from t to s for the whole batch, (B, *D)."""
        if self._supplied is None:
            return self.drawn(number)
        noise = self._supplied(t, s)
        if not isinstance(noise, Tensor):
            raise ValueError(
                f"the supplied noise is a {type(noise).__name__}; it must be a tensor of shape {self._shape}"
            )
        if noise.shape != self._shape:
            raise ValueError(f"the supplied noise has shape {tuple(noise.shape)}, but x has {self._shape}")
        return noise

    def drawn(self, number: int, rows: Sequence[int] | None = None) -> Tensor:
        """Noise of a step number for some rows of the batch, by default all: (len(rows), *D)."""
        images = self._indices if rows is None else [self._indices[row] for row in rows]
        return batch_noise(self._seed, images, number, self._shape[1:], self._dtype).to(self._device)


def _stream_seed(seed: int, stream: int) -> int:
    """Hash the numbers that all images of a stream have in common to 32 bits."""
    try:
        operator.index(seed)
    except TypeError as error:
        raise ValueError(f"seed = {seed!r} is not a whole number; pass one such as 0") from error
    digest = hashlib.blake2b(f"{operator.index(seed)}/{operator.index(stream)}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _scrambled(number: int) -> int:
    """Permute 32-bit numbers so that neighbours lie far apart: each line can be undone, so no two collide."""
    for shift, odd_factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = ((number ^ (number >> shift)) * odd_factor) & 0xFFFFFFFF
    return number ^ (number >> 16)
