"""What a bundle's network is told besides x_t and t: its classes, and what stands for no condition.

conditions.safetensors    the empty condition by name, each (1, ...); config.json says which names there are
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optcov import storage
from optcov.bundle.errors import BundleError
from optcov.networks.calls import condition_names, require_told
from optcov.networks.classes import LABELS, as_told, class_entries, takes_labels
from optcov.networks.unet_config import PLAIN_FLOATS
from optcov.prediction import check_condition
from optcov.schedule import is_whole

MAX_BYTES = 2**28  # of all empty conditions; the largest text encoders need some millions


def labels_in_rows(labels: Sequence[int], count: int, row: int = 1) -> dict[str, Tensor]:
    """The condition of `count` images that take the labels in turn, a row of images each; none without labels."""
    return {LABELS: torch.tensor(labels)[torch.arange(count) // row % len(labels)]} if labels else {}


def read_empty(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """The empty condition of these names; the file holds nothing else."""
    if not names:
        return {}
    storage.require_small(path, MAX_BYTES, BundleError)
    tensors, _ = storage.read_tensors(path)
    if set(tensors) != set(names):
        found = ", ".join(sorted(name[:50] for name in tensors)[:5]) or "nothing"
        raise BundleError(f"{path} holds {found}, but the config names {', '.join(sorted(names))}")
    return tensors


def check_empty(empty: Mapping[str, Tensor], network: nn.Module) -> None:
    """Refuse what is no empty condition of a network: each is one finite entry of an argument of its forward pass."""
    taken = condition_names(network)
    for name, value in empty.items():
        what = f"the empty condition {str(name)[:50]!r}"
        if taken is not None and name not in taken:
            raise BundleError(f"{what} is nothing that a {type(network).__name__} can be told")
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != 1:
            found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise BundleError(f"{what} is {found}; it must be a tensor of one entry, (1, ...)")
        if value.dtype not in (*PLAIN_FLOATS, torch.int64):
            raise BundleError(f"{what} holds {value.dtype}; it must hold plain floating-point numbers or int64")
        if not bool(value.isfinite().all()):
            raise BundleError(f"{what} holds NaN or infinity")
    if LABELS in empty and (entries := class_entries(network)) is not None:
        label = empty[LABELS]
        if label.shape != (1,) or label.dtype != torch.int64 or not 0 <= int(label) < entries:
            raise BundleError(f"the empty class {label.tolist()} must be one whole number from 0 to {entries - 1}")


def check_classes(classes: int | None, empty: Collection[str], network: nn.Module) -> None:
    """Refuse a number of classes that is not the network's."""
    found = classes_of(network, empty)
    if found != classes:
        words = ["no classes" if number is None else f"{number} classes" for number in (found, classes)]
        raise BundleError(
            f"the network has {words[0]}{' and an empty one' * (LABELS in empty)}, but {words[1]} are told"
        )


def classes_of(network: nn.Module, empty: Collection[str]) -> int | None:
    """How many classes a network tells apart, without the empty one."""
    entries = class_entries(network)
    return None if entries is None else entries - (LABELS in empty)


def check_told(
    condition: Mapping[str, Tensor] | None,
    count: int,
    who: str,
    classes: int | None,
    empty: Mapping[str, Tensor],
    network: nn.Module,
) -> dict[str, Tensor]:
    """A condition for `count` images of a bundle, or a ValueError; labels must be those of its classes.

    A user's own network may be told labels of any kind.
    """
    told = check_condition(condition, count)
    if LABELS in told and takes_labels(network):
        told[LABELS] = as_told(network, told[LABELS], who)
    elif LABELS in told:
        check_labels(told[LABELS], who, classes, empty)
    if classes is not None and not told and not empty:
        raise ValueError(
            f"{who} has {classes} classes and none that stands for no class; pass labels, such as "
            f'condition={{"class_labels": tensor}} with a number from 0 to {classes - 1} per image'
        )
    if not told and not empty:
        require_told(network, told)
    return told


def check_labels(labels: Tensor, who: str, classes: int | None, empty: Mapping[str, Tensor]) -> None:
    """Refuse labels (B,) that are no whole numbers, or none of the classes, the empty one included."""
    if classes is None:
        raise ValueError(f"{who} knows no classes; leave the labels out")
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}; pass whole numbers, one per image")
    entries = classes + (LABELS in empty)
    if len(labels) == 0:
        return
    low, high = (int(end) for end in torch.aminmax(labels))
    if low < 0 or high >= entries:
        known = f"its classes are 0 to {entries - 1}"
        if LABELS in empty:
            known += f", of which {int(empty[LABELS])} stands for no class"
        raise ValueError(f"there is no class {low if low < 0 else high} in {who}; {known}")


def as_labels(labels: Any, count: int) -> Tensor:
    """Labels as users write them, one for all images or one each: int64 (count,)."""
    if is_whole(labels) and abs(labels) < 2**63:
        return torch.full((count,), int(labels))
    try:
        found = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"labels = {labels!r:.80} are no whole numbers; pass one, or one per image") from error
    if found.shape != (count,) or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            f"labels are {found.dtype} of shape {tuple(found.shape)}; pass one whole number, or one for each of "
            f"{count} images"
        )
    return found.long()


def with_labels(condition: Mapping[str, Tensor] | None, labels: Any, count: int) -> Mapping[str, Tensor] | None:
    """A condition with labels as users write them, one for all images or one each."""
    if labels is None:
        return condition
    if condition is not None and LABELS in condition:
        raise ValueError(f"labels are given, and so is the condition {LABELS!r}; leave one of them out")
    return {**(condition or {}), LABELS: as_labels(labels, count)}
