"""A fresh UNet2DModel of diffusers, the backbone for images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def build_unet(
    image_shape: Sequence[int],
    channels: Sequence[int] = (32, 64, 96),
    layers_per_block: int = 1,
    attention_levels: int = 1,
    groups: int = 8,
    head_dim: int = 32,
    dropout: float = 0.0,
    classes: int = 0,
    patch_size: int = 1,
    seed: int = 0,
) -> nn.Module:
    """A fresh UNet2DModel for images (C, H, W), with attention at its lowest levels; weights depend on the seed.

    classes: how many labels it is conditioned on; one more, the last, stands for no label. 0: it takes no label.
    patch_size: side of the patches of pixels that it sees as one position; above 1 it is a PaperUNet, and quicker.
    """
    from diffusers import UNet2DModel  # seconds to import

    from optcov.networks.paper_unet import PaperUNet

    colours, height, width = image_shape
    levels = len(channels)
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"images of {height}x{width} cannot be cut into patches of {patch_size}x{patch_size}; use a patch size "
            f"that divides both sides"
        )
    multiple = patch_size * 2 ** (levels - 1)
    if height % multiple or width % multiple:
        patches = "" if patch_size == 1 else f" in patches of {patch_size}x{patch_size}"
        raise ValueError(
            f"images of {height}x{width}{patches} cannot be halved {levels - 1} times, as {levels} levels do; "
            f"use fewer levels of channels{' or smaller patches' if patches else ''}"
        )
    down = ["AttnDownBlock2D" if level >= levels - attention_levels else "DownBlock2D" for level in range(levels)]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind, own = (UNet2DModel, {}) if patch_size == 1 else (PaperUNet, {"patch_size": patch_size})
        unet: nn.Module = kind(
            sample_size=height if height == width else (height, width),
            in_channels=colours,
            out_channels=colours,
            block_out_channels=tuple(channels),
            layers_per_block=layers_per_block,
            down_block_types=tuple(down),
            up_block_types=tuple(up),
            norm_num_groups=groups,
            attention_head_dim=head_dim,
            dropout=dropout,
            num_class_embeds=classes + 1 if classes else None,
            **own,
        )
    return unet
