"""Standard normal noise that depends on (seed, image, stream) alone.

Not on the batch size, the number of processes or a restart: each image has a generator of its own. It is drawn on the
CPU, so that it is also the same on every device.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence

import torch
from torch import Tensor


def image_seed(seed: int, image: int, stream: int) -> int:
    """Number the generator of one image, in 32 bits: torch's CPU generator takes no more of a seed.

    Hashing all three into 32 bits would give two of 50,000 images the same noise in one run of four. Within a stream
    this is one-to-one in the image, for 2^32 images.
    """
    return _stream_seed(seed, stream) ^ _scrambled(image & 0xFFFFFFFF)


def image_generator(seed: int, image: int, stream: int) -> torch.Generator:
    """Return the generator of one image. A stream is a step of sampling, or a time of a sweep."""
    return torch.Generator().manual_seed(image_seed(seed, image, stream))


def image_noise(seed: int, image: int, stream: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Noise of one image: shape is that of the image."""
    return torch.randn(tuple(shape), generator=image_generator(seed, image, stream), dtype=dtype)


def batch_noise(
    seed: int, images: Sequence[int], stream: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Noise of several images, (len(images), *shape)."""
    noise = torch.empty((len(images), *shape), dtype=dtype)
    generator, stream_seed = torch.Generator(), _stream_seed(seed, stream)
    for row, image in zip(noise, images, strict=True):  # what image_noise draws, with no copy and one generator
        row.normal_(generator=generator.manual_seed(stream_seed ^ _scrambled(image & 0xFFFFFFFF)))
    return noise


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
