"""Standard normal noise that depends on (seed, image, stream) alone.

Not on the batch size, the number of processes or a restart: each image has a generator of its own. It is drawn on the
CPU, so that it is also the same on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def image_generator(seed: int, image: int, stream: int) -> torch.Generator:
    """Return the generator of one image. A stream is a step of sampling, or a time of a sweep."""
    digest = hashlib.blake2b(f"{seed}/{image}/{stream}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") - 2**63)


def image_noise(seed: int, image: int, stream: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Noise of one image: shape is that of the image."""
    return torch.randn(tuple(shape), generator=image_generator(seed, image, stream), dtype=dtype)


def batch_noise(
    seed: int, images: Sequence[int], stream: int, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Noise of several images, (len(images), *shape)."""
    return torch.stack([image_noise(seed, image, stream, shape, dtype) for image in images])
