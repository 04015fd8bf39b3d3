"""Folders of image files, in the order of their names, with every check made before an image is decoded."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optcov.data.images import DataError, ImageSet, require_memory
from optcov.data.labels import folder_captions, folder_labels
from optcov.data.modes import channels_of, pixels_of, say_converted
from optcov.data.png import png_damage

FORMATS = {"PNG": (".png",), "JPEG": (".jpg", ".jpeg"), "BMP": (".bmp",), "WEBP": (".webp",), "PPM": (".ppm", ".pgm")}
MAX_PIXELS = 2**24  # of one image: 4096 x 4096, so that a small file cannot claim gigabytes
ORIENTATION = 0x0112  # the tag of EXIF
SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange height and width

# what Pillow's decoders are known to raise on damaged files, beside its own errors
_DECODING = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError)


def image_files(directory: Path) -> list[Path]:
    """Image files below a directory, sorted by their path; hidden files do not count."""
    suffixes = {suffix for group in FORMATS.values() for suffix in group}
    directory = Path(directory)
    relative = (path.relative_to(directory) for path in directory.rglob("*") if path.suffix.lower() in suffixes)
    shown = (path for path in relative if not any(part.startswith(".") for part in path.parts))
    return [directory / path for path in sorted(shown, key=lambda path: path.as_posix())]


def load_folder(directory: Path, parts: Sequence[Path] = ()) -> ImageSet:
    """Load every image below a directory; they must agree in size. Grey ones become RGB if there are coloured ones.

    parts: all parts of the data, such as train and test; classes by name are numbered over all of them.
    """
    files = image_files(directory)
    if not files:
        known = ", ".join(suffix for group in FORMATS.values() for suffix in group)
        raise DataError(f"{directory} holds no images; known endings are {known}")
    labels = folder_labels(Path(directory), files, {part: image_files(part) for part in parts})
    modes: Counter[str] = Counter()
    first = read_image(files[0], seen=modes)
    require_memory(len(files) * first.nbytes, str(directory))
    images = np.empty((len(files), *first.shape), np.uint8)
    images[0] = first
    for number, path in enumerate(files[1:], start=1):
        pixels = read_image(path, first.shape, files[0], modes)
        if len(pixels) > images.shape[1]:
            require_memory(3 * images.nbytes, str(directory))
            images = np.repeat(images, 3, axis=1)
        images[number] = pixels  # grey goes to every channel
    say_converted(Path(directory).name, modes)
    captions = folder_captions(Path(directory), files)
    return ImageSet(torch.from_numpy(images), labels, Path(directory).name, captions)


def read_image(
    path: Path, shape: tuple[int, ...] | None = None, like: Path | None = None, seen: Counter[str] | None = None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read one image as uint8 (C, H, W), upright, grey or RGB.

    shape: what its sides must have because the file `like` has it. seen: counts the colour modes of files.
    """
    from PIL import Image, ImageOps

    broken = (*_DECODING, struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"cannot read the image {path}: it is a device or a pipe, not a file; remove it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of damage that it reads over
            with Image.open(path, formats=tuple(FORMATS)) as image:
                turned = _orientation(image)
                _check_header(path, image.mode, image.size[::-1] if turned in SIDEWAYS else image.size, shape, like)
                if image.format == "PNG" and (damage := png_damage(path.read_bytes())):
                    raise DataError(f"cannot read the image {path}: {damage}; remove or replace it")
                pixels = pixels_of(ImageOps.exif_transpose(image) if turned else image)
                if seen is not None:
                    seen[image.mode] += 1
    except DataError:
        raise
    except (*broken, Warning) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise DataError(f"cannot read the image {path}: {reason or type(error).__name__}; replace it") from error
    return pixels


def _orientation(image: Any) -> int | None:
    """How the camera was held, 2 to 8 as in EXIF; None if it was upright or nothing tells."""
    found = image.getexif().get(ORIENTATION)
    return found if found in range(2, 9) else None


def _check_header(
    path: Path, mode: str, size: tuple[int, int], shape: tuple[int, ...] | None, like: Path | None
) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise DataError(f"{path} declares {width} x {height} pixels; at most {MAX_PIXELS} are decoded")
    channels_of(mode, str(path))
    if shape is not None and shape[1:] != (height, width):
        raise DataError(
            f"{path} is {width} x {height}, but {like} is {shape[2]} x {shape[1]}; a set of images needs one size"
        )
