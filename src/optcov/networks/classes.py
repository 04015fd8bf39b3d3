"""How many classes a network tells apart, by its own settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LABELS = "class_labels"  # the name that diffusers' networks take classes by


def takes_labels(network: nn.Module) -> bool:
    """Whether a user's own network takes labels, by the name that diffusers' networks have for them."""
    if isinstance(getattr(network, "config", None), Mapping):
        return False
    taken = inspect.signature(getattr(network, "function", network.forward)).parameters
    return LABELS in taken


def as_told(network: nn.Module, labels: Tensor, who: str) -> Tensor:
    """Labels (B,) as a user's own network takes them: one-hot for EDM's, which have a label_dim."""
    length = getattr(network, "label_dim", None)
    if type(length) is not int or length < 1 or labels.ndim != 1 or labels.is_floating_point():
        return labels
    strange = labels[(labels < 0) | (labels >= length)]
    if len(strange):
        raise ValueError(f"there is no class {int(strange[0])} in {who}; its classes are 0 to {length - 1}")
    return torch.nn.functional.one_hot(labels.long(), length).float()


def class_entries(network: nn.Module) -> int | None:
    """Entries of a network's table of classes, one that stands for no class included; None if it takes no labels."""
    config: Any = getattr(network, "config", None)
    if not isinstance(config, Mapping) or config.get("class_embed_type") is not None:
        return None
    if any(kind.__name__ == "DiTTransformer2DModel" for kind in type(network).__mro__):
        return int(config["num_embeds_ada_norm"]) + 1  # a last one stands for no class
    found = config.get("num_class_embeds")
    return None if found is None else int(found)
