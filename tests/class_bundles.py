"""Small class-conditional bundles: three classes, and one more that stands for none."""

from __future__ import annotations

import torch
from torch import nn

from optcov import Schedule
from optcov.bundle import Bundle
from optcov.networks import Backbone, HeadedNetwork
from small_bundles import SHAPE, small_head, small_numbers, small_unet

CLASSES = 3


def class_unet(entries: int = CLASSES + 1, seed: int = 0) -> nn.Module:
    """A U-Net with a table of classes whose entries make a difference."""
    unet = small_unet(seed, num_class_embeds=entries)
    with torch.no_grad():
        unet.class_embedding.weight.mul_(5)  # type: ignore[union-attr,operator]
    return unet


def class_bundle(schedule: Schedule | None = None, empty: bool = True, heads: bool = True) -> Bundle:
    """With an empty class, the last one, or with classes alone."""
    schedule = schedule or Schedule.vp_sde()
    network = HeadedNetwork(Backbone.of(class_unet(CLASSES + empty)), schedule).eval().requires_grad_(False)
    bundle = Bundle(network, SHAPE, name="classes")
    bundle = bundle.with_empty_class(CLASSES) if empty else bundle
    if not heads:
        return bundle
    return bundle.with_heads({"npr": small_head(1), "sn": small_head(2)}, bundle.fingerprint).with_numbers(
        small_numbers(schedule)
    )
