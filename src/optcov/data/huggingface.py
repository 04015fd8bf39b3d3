"""Images from the Hugging Face hub, by the optional package `datasets`; no code of a data set is ever run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optcov.data.images import DataError, ImageSet
from optcov.data.modes import channels_of, pixels_of, say_converted


def load_hub(name: str, split: str) -> ImageSet:
    """Load a split of a data set on the hub, or of a local directory of parquet files."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hf:{name} needs the package datasets; pip install 'optcov[datasets]'") from error
    try:
        table = datasets.load_dataset(name, split=split)
    except Exception as error:  # hub, network, parser and file errors have no common base in that package
        raise DataError(f"cannot load hf:{name} ({split}): {' '.join(str(error).split())[:300]}") from error
    column = next((key for key, kind in table.features.items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise DataError(f"hf:{name} has no image column among {', '.join(table.features)}")
    label = next((key for key, kind in table.features.items() if isinstance(kind, datasets.ClassLabel)), None)
    seen: Counter[str] = Counter()
    where = f"hf:{name} ({split})"
    pixels = [_pixels(table, column, number, f"{where}, row {number}", seen) for number in range(len(table))]
    if len({image.shape[1:] for image in pixels}) != 1:
        odd = next(number for number, image in enumerate(pixels) if image.shape[1:] != pixels[0].shape[1:])
        raise DataError(
            f"{where}: row {odd} has the shape {pixels[odd].shape}, row 0 has {pixels[0].shape}; "
            f"a set of images needs one size"
        )
    channels = max(map(len, pixels))
    pixels = [np.broadcast_to(image, (channels, *image.shape[1:])) for image in pixels]  # grey goes to every channel
    say_converted(where, seen)
    labels = None if label is None else torch.tensor(list(table[label]))
    return ImageSet(torch.from_numpy(np.stack(pixels)), labels, f"{Path(name).name} ({split})")


def _pixels(table: Any, column: str, number: int, name: str, seen: Counter[str]) -> np.ndarray[Any, Any]:
    """uint8 (C, H, W) of the image in a row."""
    try:
        image = table[number][column]
    except Exception as error:  # decoding fails in that package, in pyarrow or in Pillow, with no common base
        raise DataError(f"cannot read the image of {name}: {' '.join(str(error).split())[:200]}") from error
    if image is None:
        raise DataError(f"{name} has no image; remove or replace it")
    channels_of(image.mode, name)
    seen[image.mode] += 1
    return pixels_of(image)
