"""Images in and out: sources of 8-bit images, and the way to [-1, 1] and back."""

from optcov.data.export import grid, write_png
from optcov.data.images import DataError, ImageSet, flip_half, from_8bit, to_8bit
from optcov.data.modes import with_channels
from optcov.data.sources import load, load_mixed

__all__ = [
    "DataError",
    "ImageSet",
    "flip_half",
    "from_8bit",
    "grid",
    "load",
    "load_mixed",
    "to_8bit",
    "with_channels",
    "write_png",
]
