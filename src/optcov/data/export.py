"""Images out: PNG files, and grids to look at."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from optcov import storage
from optcov.data.images import DataError


def write_png(path: Path, image: Tensor) -> None:
    """Write one 8-bit image (C, H, W), C = 1 or 3, as PNG."""
    storage.write_bytes(path, png_bytes(image))


def png_bytes(image: Tensor) -> bytes:
    """The content of a PNG file of one 8-bit image (C, H, W), C = 1 or 3."""
    from PIL import Image

    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in (1, 3):
        raise DataError(
            f"a PNG needs a uint8 image (1 or 3, H, W), got {image.dtype} of shape {tuple(image.shape)}; "
            f"convert images in [-1, 1] by data.to_8bit"
        )
    pixels = image.cpu().permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()


def grid(images: Tensor, columns: int, border: int = 2) -> Tensor:
    """Arrange 8-bit images (n, C, H, W) row by row on white: (C, rows (H + border) + border, ...)."""
    if columns < 1:
        raise DataError(f"a grid of {columns} columns holds nothing; use at least 1")
    n, channels, height, width = images.shape
    rows = -(-n // columns)
    size = (rows * (height + border) + border, columns * (width + border) + border)
    canvas = torch.full((channels, *size), 255, dtype=torch.uint8)
    for number, image in enumerate(images):
        top, left = ((number // columns) * (height + border), (number % columns) * (width + border))
        canvas[:, top + border : top + border + height, left + border : left + border + width] = image
    return canvas
