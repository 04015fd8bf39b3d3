"""How many classes a network tells apart, by its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

LABELS = "class_labels"  # the name that diffusers' networks take classes by


def class_entries(network: nn.Module) -> int | None:
    """Entries of a network's table of classes, one that stands for no class included; None if it takes no labels."""
    config: Any = getattr(network, "config", None)
    if not isinstance(config, Mapping) or config.get("class_embed_type") is not None:
        return None
    if any(kind.__name__ == "DiTTransformer2DModel" for kind in type(network).__mro__):
        return int(config["num_embeds_ada_norm"]) + 1  # a last one stands for no class
    found = config.get("num_class_embeds")
    return None if found is None else int(found)
