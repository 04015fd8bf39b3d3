"""What a fit is told about its data: train and test parts, each data point with its own entry of the condition."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.bundle import Bundle
from optcov.data.tensors import DataSet, TensorSet, as_set, as_sets, fitted_to
from optcov.fitting.batches import Conditioned, emptied
from optcov.fitting.config import TrainingError
from optcov.networks.classes import LABELS, takes_labels
from optcov.prediction import check_condition, take

Part = DataSet | Conditioned
SLACK = 1e-3  # of the width of the data range, as for scores


def open_parts(
    data: Any,
    condition: Mapping[str, Tensor] | None,
    held_out: bool,
    shape: tuple[int, ...],
    data_range: tuple[float, float] | None,
    who: str,
) -> tuple[Part, Part | None]:
    """Train and test parts of what a user has, in the shape that the network `who` takes.

    condition: entry i belongs to data point i; it may also come with the data, as (data, condition).
    """
    data, condition = with_condition(data, condition)
    if condition is None:
        train, test = as_sets(data, held_out)
        known: dict[str, Tensor] = {}
    else:
        train, test, known = _numbered(data, condition, held_out)
    parts = [None if part is None else fitted_to(part, shape, who) for part in (train, test)]
    lows = [_check_range(part, data_range) for part in parts]
    if lows[0] is not None and data_range is not None and data_range[0] < 0 <= lows[0]:
        logging.getLogger(__name__).warning(
            f"no value of the data is below 0, but the data range is {tuple(data_range)}; if the data runs from 0 to "
            f"1, scale it by 2 * x - 1"
        )
    first, second = (_told(part, known) for part in parts)
    assert first is not None
    return first, second


def with_condition(data: Any, condition: Mapping[str, Tensor] | None) -> tuple[Any, Mapping[str, Tensor] | None]:
    """Data and its condition, which may also come with the data, as (data, condition)."""
    if not (isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping)):
        return data, condition
    if condition is not None:
        raise TrainingError("the data comes with a condition, and condition= is given, too; leave one of them out")
    return data


def in_memory(data: Any) -> DataSet:
    """Data that a condition belongs to, as one set."""
    if isinstance(data, str | Path):
        raise TrainingError("a condition has one entry per data point; give data in memory with it, not a path")
    return as_set(data)


def told_to(bundle: Bundle, part: Part, share: float, generator: torch.Generator) -> Part:
    """A part with all that the bundle's network is told about it.

    Labels of the data are the condition of a network with classes, unless another one was given. A share of the data
    gets the empty condition, if the network knows one: which, depends on the generator alone.
    """
    known = dict(part.known) if isinstance(part, Conditioned) else {}
    if not known and bundle.classes is not None:
        labels: Tensor | None = part.labels
        if labels is None:
            _refuse_captions(bundle, part)
            if bundle.empty_condition:
                return part
            raise TrainingError(
                f"{bundle.name} has {bundle.classes} classes and none that stands for no class, but {part.name} has no "
                f"labels; give labelled images, or say by empty_class which class stands for none"
            )
        known = bundle.told_labels(labels, part.name)
    elif not known and part.labels is not None and takes_labels(bundle.unet):
        known = {LABELS: part.labels}
    if not known:
        return part
    known = bundle.check_told(known, len(part))
    if bundle.empty_condition:
        chosen = torch.rand(len(part), generator=generator) < share
        known = emptied(known, chosen, {name: value.cpu() for name, value in bundle.empty_condition.items()})
    return Conditioned(part.source if isinstance(part, Conditioned) else part, known)


def _refuse_captions(bundle: Bundle, part: Part) -> None:
    """Texts where a network takes classes are not left out in silence."""
    if not isinstance(part, Conditioned) and part.captions is not None:
        raise TrainingError(
            f"{bundle.name} is told a class of each image, but {part.name} has texts; number the classes from 0, as "
            f"(images, labels) or as the column label of a metadata.csv, or give images alone"
        )


def _numbered(
    data: Any, condition: Mapping[str, Tensor], held_out: bool
) -> tuple[DataSet, DataSet | None, dict[str, Tensor]]:
    """Parts whose labels are the numbers of their data points, by which each finds its entries again."""
    whole = in_memory(data)
    known = check_condition(condition, len(whole))
    numbered = replace(whole, labels=torch.arange(len(whole)))
    train, test = numbered.split(0.1) if held_out else (numbered, None)
    return train, test, known


def _told(part: DataSet | None, known: dict[str, Tensor]) -> Part | None:
    if part is None or not known:
        return part
    assert part.labels is not None
    return Conditioned(part, take(known, part.labels))


def _check_range(part: DataSet | None, data_range: tuple[float, float] | None) -> float | None:
    """Refuse floating-point data outside of the range: such as pixels from 0 to 255. Its least value, if it has one."""
    if data_range is None or not isinstance(part, TensorSet):
        return None
    low, high = float(part.values.min()), float(part.values.max())
    slack = SLACK * (data_range[1] - data_range[0])
    if low < data_range[0] - slack or high > data_range[1] + slack:
        raise TrainingError(
            f"the data runs from {low:.4g} to {high:.4g}, outside the data range {tuple(data_range)}; scale it to that "
            f"range, or give 8-bit images as uint8"
        )
    return low
