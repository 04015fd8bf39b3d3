"""Colour modes: convert images to grey or RGB, and log it once.

Transparent pixels are put on white, palettes become RGB; grey becomes RGB, and RGB grey, where a network asks for it.
What would lose more than that (16 bits, floats) is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optcov.data.images import DataError, ImageSet
from optcov.text_table import printable

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

CHANNELS = {"L": 1, "1": 1, "LA": 1, "RGB": 3, "RGBA": 3, "P": 3, "PA": 3, "CMYK": 3, "YCbCr": 3}  # of what they become
PLAIN = ("L", "RGB")
WORDS = {  # mode -> what its images are called, and what becomes of them
    "1": ("black-and-white", "grey"),
    "LA": ("grey images with transparency", "grey on white"),
    "RGBA": ("RGBA", "RGB on white"),
    "P": ("palette", "RGB"),
    "PA": ("palette images with transparency", "RGB on white"),
    "CMYK": ("CMYK", "RGB"),
    "YCbCr": ("YCbCr", "RGB"),
}
CHUNK = 4096  # images that are converted at once
LUMA = (19595, 38470, 7471)  # of 2^16, ITU-R 601, as Pillow takes them; a grey pixel keeps its level

_log = logging.getLogger("optcov.data")


def channels_of(mode: str, name: str) -> int:
    """How many channels an image of this mode has when it is read."""
    if mode not in CHANNELS:
        raise DataError(f"{name} has the colour mode {mode}; convert it to 8-bit grey (L) or RGB")
    return CHANNELS[mode]


def pixels_of(image: Any) -> Pixels:
    """The bytes (C, H, W) of an image of Pillow, grey or RGB."""
    if image.mode in ("LA", "RGBA", "PA") or (image.mode == "P" and "transparency" in image.info):
        pixels = over_white(np.array(image.convert("RGBA"), dtype=np.uint8))
        pixels = pixels[..., :1] if image.mode == "LA" else pixels
    else:
        plain = image if image.mode in PLAIN else image.convert("L" if image.mode == "1" else "RGB")
        pixels = np.array(plain, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def over_white(pixels: Pixels) -> Pixels:
    """RGBA (..., 4) on a white ground, (..., 3)."""
    alpha = pixels[..., 3:].astype(np.uint16)
    mixed = (pixels[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return mixed.astype(np.uint8)


def with_channels(images: ImageSet, channels: int) -> ImageSet:
    """The images as a network of this many channels takes them: grey as RGB or RGB as grey, and that is said once."""
    found = images.shape[0]
    if found == channels or {found, channels} != {1, 3}:
        return images  # nothing to convert, or no conversion exists
    was, becomes = ("RGB", "grey") if channels == 1 else ("grey", "RGB")
    say_once(f"{images.name}: converted {len(images)} {was} images to {becomes}, which the network takes")
    converted = images.images.expand(-1, 3, -1, -1).contiguous() if channels == 3 else _grey(images.images)
    return ImageSet(converted, images.labels, images.name, images.captions)


def say_converted(name: str, modes: Mapping[str, int]) -> None:
    """Say what was converted of a set that had images of these modes, how many of each."""
    for mode, (was, becomes) in WORDS.items():
        if modes.get(mode):
            called = was if "images" in was else f"{was} images"
            say_once(f"{name}: converted {modes[mode]} {called} to {becomes}")
    if modes.get("L") and any(CHANNELS[mode] == 3 for mode in modes):
        say_once(f"{name}: converted {modes['L']} grey images to RGB, as there are coloured ones among them")


@lru_cache(maxsize=1000)
def say_once(text: str) -> None:
    """Log a sentence, which Python shows on standard error; once, though commands load a set split by split."""
    _log.warning(printable(text))


def _grey(images: Tensor) -> Tensor:
    """RGB (n, 3, H, W) as grey (n, 1, H, W)."""
    weights = torch.tensor(LUMA, dtype=torch.int32)[:, None, None]
    chunks = (images[start : start + CHUNK] for start in range(0, len(images), CHUNK))
    parts = [((part.int() * weights).sum(1, keepdim=True) + 2**15) >> 16 for part in chunks]
    return torch.cat([part.to(torch.uint8) for part in parts])
