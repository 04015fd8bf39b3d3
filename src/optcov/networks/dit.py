"""A fresh DiTTransformer2DModel of diffusers: a class-conditional transformer on patches of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def build_dit(
    image_shape: Sequence[int],
    patch_size: int = 4,
    width: int = 128,
    layers: int = 6,
    head_dim: int = 32,
    dropout: float = 0.0,
    classes: int = 10,
    seed: int = 0,
) -> nn.Module:
    """A fresh DiTTransformer2DModel for square images (C, H, H); weights depend on the seed.

    classes: how many labels it is conditioned on; one more, the last, stands for no label. It begins as DiT's authors
    begin: each block is the identity, and the output is zero.
    """
    from diffusers import DiTTransformer2DModel  # seconds to import

    colours, height, width_of_image = image_shape
    if height != width_of_image or height % patch_size:
        raise ValueError(
            f"images of {height}x{width_of_image} cannot be cut into patches of {patch_size}x{patch_size} by a DiT; "
            f"use square images whose side is a multiple of the patch size"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dit: Any = DiTTransformer2DModel(
            num_attention_heads=width // head_dim,
            attention_head_dim=head_dim,
            in_channels=colours,
            out_channels=colours,
            num_layers=layers,
            dropout=dropout,
            sample_size=height,
            patch_size=patch_size,
            num_embeds_ada_norm=classes,
        )
        _start(dit)
    for module in dit.modules():
        if hasattr(module, "dropout_prob"):  # of labels: a block of its own would leave out others than its neighbour
            module.dropout_prob = 0.0
    return dit  # type: ignore[no-any-return]


def _start(dit: Any) -> None:
    """Initial weights as in the paper of DiT: diffusers leaves its modules as torch makes them."""
    for module in dit.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    nn.init.xavier_uniform_(dit.pos_embed.proj.weight.flatten(1))
    still = [block.norm1.linear for block in dit.transformer_blocks] + [dit.proj_out_1, dit.proj_out_2]
    for layer in still:
        nn.init.zeros_(layer.weight)
