"""What a visitor gives: numbers, files and drawings, checked and brought into the shape of the bundle's images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageChops, ImageOps
from torch import Tensor

from optcov.bundle import Bundle
from optcov.bundle.conditions import labels_in_rows
from optcov.data.folders import read_image
from optcov.data.images import DataError
from optcov.networks.classes import LABELS

MIN_STEPS, MAX_STEPS, MAX_IMAGES = 2, 100, 16  # a path has a first and a last time
MAX_SEED, MAX_GUIDANCE = 2**31 - 1, 20.0
MAX_BYTES = 8 * 2**20  # of an uploaded file
ANY, EACH = -1, -2  # stand for the empty condition, and for each class in turn, in a list of classes
CANVAS = 320  # pixels that the longer side of a drawing has at most, where the image has fewer

Drawing = Mapping[str, Any]  # what the editor gives: background, layers and composite, each an image of Pillow


def check_playable(bundle: Bundle) -> None:
    """Refuse bundles whose data is no picture."""
    shape, bare = bundle.picture_shape, bundle.data_range is None and bundle.decoder is None
    if len(shape) != 3 or shape[0] not in (1, 3) or bare:
        raise ValueError(
            f"optcov play shows grey and RGB images, but {bundle.name} has data of shape {shape}"
            f"{' without a range' if bare else ''}; use it from Python, by bundle.sample"
        )


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number from a field, which may be empty."""
    found = number(name, value, low, high)
    if found != int(found):
        raise ValueError(f"{name} {found:g} is not a whole number; choose one from {low} to {high}")
    return int(found)


def number(name: str, value: Any, low: float, high: float) -> float:
    """A number from a field, which may be empty."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is empty or no number; choose one from {_plain(low)} to {_plain(high)}")
    if not low <= value <= high:  # also where it is NaN
        shown = value if isinstance(value, int) else f"{value:g}"
        raise ValueError(f"{name} {str(shown)[:20]} is out of range; choose one from {_plain(low)} to {_plain(high)}")
    return float(value)


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def choice(name: str, value: Any, known: list[str]) -> str:
    """One of the names that a list offers."""
    if value not in known:
        raise ValueError(f"{name} {str(value)[:80]!r} is not offered; choose one of {'; '.join(known)}")
    return str(value)


def condition(bundle: Bundle, label: Any, count: int = 1) -> dict[str, Tensor]:
    """What the network is told about `count` images of a class, or of EACH; nothing for ANY or None, the empty one."""
    if bundle.classes is None or (label in (None, ANY) and bundle.empty_condition):
        return {}
    known = bundle.class_numbers
    if label == EACH:
        return labels_in_rows(known, count)
    if label not in known or isinstance(label, bool):
        raise ValueError(f"{bundle.name} has no class {str(label)[:80]!r}; choose one from {known[0]} to {known[-1]}")
    return {LABELS: torch.full((count,), int(label))}


def read_upload(path: Any, shape: tuple[int, ...]) -> Image.Image:
    """An uploaded file as a picture for the editor: cropped to the middle and resized to the bundle's shape."""
    if not isinstance(path, str | Path) or not Path(path).is_file():
        raise ValueError("no file came; choose a PNG, JPEG, BMP or WebP image")
    path = Path(path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path.name} has {size / 2**20:.1f} MB; choose an image of at most {MAX_BYTES >> 20} MB")
    try:
        pixels = read_image(path)
    except DataError as error:  # the visitor knows the file by its name, and not where it was put
        raise ValueError(str(error).replace(str(path), path.name)) from error
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    return enlarged(to_pixels(image, shape))


def to_pixels(image: Image.Image, shape: tuple[int, ...]) -> Tensor:
    """A picture of any size as 8-bit pixels (C, H, W) of the bundle's shape: cropped to the middle, then resized."""
    channels, height, width = shape
    ground = Image.new("RGBA", image.size, "black")
    flat = Image.alpha_composite(ground, image.convert("RGBA")).convert("L" if channels == 1 else "RGB")
    fitted = ImageOps.fit(flat, (width, height), Image.Resampling.BOX)
    pixels = torch.from_numpy(np.array(fitted, dtype=np.uint8))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def to_picture(pixels: Tensor) -> Image.Image:
    """8-bit pixels (C, H, W) as a picture of Pillow."""
    array = pixels.cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).convert("RGB")


def enlarged(pixels: Tensor, most: int = CANVAS) -> Image.Image:
    """The same, each pixel a square, as large as fits; a drawing on it goes back to pixels without loss."""
    picture = to_picture(pixels)
    factor = max(1, most // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def blank(shape: tuple[int, ...]) -> Image.Image:
    """A black picture to draw on."""
    return enlarged(torch.zeros(shape, dtype=torch.uint8))


def drawn_pixels(drawing: Drawing | None, shape: tuple[int, ...]) -> Tensor:
    """What the editor shows, background and strokes, as 8-bit pixels (C, H, W)."""
    return to_pixels(_part(drawing, "composite"), shape)


def background_pixels(drawing: Drawing | None, shape: tuple[int, ...]) -> Tensor:
    """The same without the strokes."""
    return to_pixels(_part(drawing, "background"), shape)


def erased_pixels(drawing: Drawing | None, shape: tuple[int, ...]) -> Tensor:
    """Where strokes lie, booleans (H, W): a pixel, or a place of latents, that is touched at all counts."""
    size = _part(drawing, "background").size
    strokes = Image.new("L", size, 0)
    layers = (drawing or {}).get("layers") or []
    if not isinstance(layers, list) or not all(isinstance(layer, Image.Image) for layer in layers):
        raise ValueError("the strokes are no images; paint over a part of the image again")
    for layer in layers:
        strokes = ImageChops.lighter(strokes, layer.convert("RGBA").getchannel("A").resize(size))
    hidden = to_pixels(strokes.point(lambda alpha: 255 if alpha > 25 else 0), (1, *shape[1:]))[0] > 0
    if not bool(hidden.any()):
        raise ValueError("nothing is erased yet; paint over a part of the image first")
    if bool(hidden.all()):
        raise ValueError("everything is erased, so that nothing is left to go by; leave some of the image")
    return hidden


def _part(drawing: Drawing | None, name: str) -> Image.Image:
    image = drawing.get(name) if isinstance(drawing, Mapping) else None
    if not isinstance(image, Image.Image) or 0 in image.size:
        raise ValueError("there is no image yet; draw one, upload one, or take an example")
    return image
