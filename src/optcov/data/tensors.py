"""Data in memory as a source: tensors of images or of any other shape, with labels where there are some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from optcov.data.images import DataError, ImageSet, check_captions, select_captions, split_indices
from optcov.data.modes import with_channels
from optcov.data.sources import load
from optcov.identity import digest_tensors


@final
@dataclass(frozen=True)
class TensorSet:
    """Data points as they are, float32 (n, *D), with labels (n,) or None."""

    values: Tensor
    labels: Tensor | None = None
    name: str = "data"
    captions: tuple[str, ...] | None = None  # a text for each data point

    def __post_init__(self) -> None:
        if self.values.ndim < 2 or not self.values.is_floating_point() or 0 in self.values.shape:
            raise DataError(
                f"data in memory is a floating-point tensor (n, *D), got {self.values.dtype} of shape "
                f"{tuple(self.values.shape)}; images may also be uint8 (n, C, H, W)"
            )
        if self.values.is_meta:
            raise DataError("the data is on the device meta, which holds no values; move it to the CPU")
        if not bool(self.values.isfinite().all()):
            raise DataError("the data holds NaN or infinite values; clean it first")
        if self.labels is not None and self.labels.shape != (len(self.values),):
            raise DataError(f"there are {len(self.values)} data points but labels of shape {tuple(self.labels.shape)}")
        check_captions(self.captions, len(self.values), self.name)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one data point."""
        return tuple(self.values.shape[1:])

    def x_0(self, index: slice | Tensor | None = None) -> Tensor:
        """Data points at the index, float32 (m, *D)."""
        return (self.values if index is None else self.values[index]).float()

    def select(self, index: slice | Tensor, name: str | None = None) -> TensorSet:
        """Some of the data, as a set."""
        labels = None if self.labels is None else self.labels[index]
        captions = select_captions(self.captions, index)
        return TensorSet(self.values[index], labels, name or self.name, captions)

    def split(self, test_share: float, seed: int = 0) -> tuple[TensorSet, TensorSet]:
        """Train and test parts by a permutation that depends on the number of data points and the seed alone."""
        count = max(1, round(len(self) * test_share))
        if count >= len(self):
            raise DataError(f"{len(self)} data points are too few to hold some out; give more")
        train, test = split_indices(len(self), count, seed)
        return self.select(train, f"{self.name} (train)"), self.select(test, f"{self.name} (test)")

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of shape and values, in hexadecimal; labels do not count."""
        return digest_tensors({"values": self.values})


DataSet = ImageSet | TensorSet


def as_sets(data: Any, held_out: bool = True) -> tuple[DataSet, DataSet | None]:
    """Train and test parts of what a user has: a path, a set, images as an array, or (data, labels).

    Arrays: uint8 (n, C, H, W) or (n, H, W, C) is images; floating point is taken as it is, images in [-1, 1]. What has
    no split of its own is split 90 % to 10 % by a seed.
    """
    if isinstance(data, str) and not data:
        raise DataError("the path of the data is empty; give a directory or a file of images")
    if isinstance(data, str | Path):
        return load(data, "train"), load(data, "test") if held_out else None
    whole = as_set(data)
    return whole.split(0.1) if held_out else (whole, None)


def as_set(data: Any) -> DataSet:
    """Data in memory as one set: a set, a tensor or array, (data, labels), or (data, captions)."""
    if isinstance(data, ImageSet | TensorSet):
        return data
    values, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    if isinstance(labels, str):
        raise DataError(f"the caption {labels[:50]!r} is one text; give a list with one for each image")
    if labels is not None and is_captions(labels):
        whole = as_set(values)
        return replace(whole, captions=tuple(str(text) if isinstance(text, np.str_) else text for text in labels))
    if not isinstance(values, Tensor | np.ndarray):
        raise DataError(
            f"data of type {type(values).__name__} is not known; give a path, a tensor or array (n, C, H, W), "
            f"or (data, labels)"
        )
    try:
        tensor = torch.as_tensor(values)
        known = None if labels is None else torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the data or its labels cannot be read as tensors: {error}; labels are whole numbers"
        ) from error
    known = None if known is None else _whole(known)
    if tensor.dtype != torch.uint8:
        return TensorSet(tensor, known)
    if tensor.ndim == 4 and tensor.shape[1] not in (1, 3, 4) and tensor.shape[3] in (1, 3, 4):
        tensor = tensor.permute(0, 3, 1, 2).contiguous()
    return ImageSet(tensor, known)


def _whole(labels: Tensor) -> Tensor:
    """Labels as int64; numbers between the whole ones are refused."""
    if labels.is_complex():
        raise DataError("labels are complex numbers; number the classes from 0")
    if labels.is_floating_point() and bool((broken := labels != labels.round()).any()):
        raise DataError(f"labels are whole numbers, but one is {float(labels[broken][0])}; number the classes from 0")
    return labels.long()


def is_captions(value: Any) -> bool:
    """Whether something is a list of texts."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and len(value) > 0 and isinstance(value[0], str)  # numpy's texts are texts
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], str)


def fitted_to(data: DataSet, shape: tuple[int, ...], who: str) -> DataSet:
    """The data in the shape that a network takes: channels of images are converted, anything else is refused."""
    if isinstance(data, ImageSet) and len(shape) == 3:
        data = with_channels(data, shape[0])
    if tuple(data.shape) != tuple(shape):
        raise DataError(
            f"{who} takes data of shape {tuple(shape)}, but {data.name} has {tuple(data.shape)}; use data like that "
            f"which it was trained on"
        )
    return data
