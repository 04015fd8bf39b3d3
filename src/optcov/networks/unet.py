"""Building, writing and reading diffusers' UNet2DModel, the backbone for images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optcov.storage import StorageError, read_json, read_tensors, write_json, write_tensors

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"


def build_unet(
    image_shape: Sequence[int],
    channels: Sequence[int] = (32, 64, 96),
    layers_per_block: int = 1,
    attention_levels: int = 1,
    groups: int = 8,
    head_dim: int = 32,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """A fresh UNet2DModel for images (C, H, W), with attention at its lowest levels; weights depend on the seed."""
    from diffusers import UNet2DModel  # seconds to import

    colours, height, width = image_shape
    levels = len(channels)
    if height % 2 ** (levels - 1) or width % 2 ** (levels - 1):
        raise ValueError(
            f"images of {height}x{width} cannot be halved {levels - 1} times, as {levels} levels do; "
            f"use fewer levels of channels"
        )
    down = [
        "AttnDownBlock2D" if level >= levels - attention_levels else "DownBlock2D" for level in range(levels)
    ]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet: nn.Module = UNet2DModel(
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
        )
    return unet


def save_unet(directory: Path, unet: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Write a UNet as diffusers does, each file at once or not at all; dtype=torch.float16 halves it."""
    directory = Path(directory)
    config: Any = unet.config
    plain = {
        key: value for key, value in config.items() if key not in ("_use_default_values", "_name_or_path")
    }
    tensors = {name: tensor.to(dtype) if dtype else tensor for name, tensor in unet.state_dict().items()}
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / CONFIG, {"_class_name": type(unet).__name__, **plain})


def load_unet(directory: Path) -> nn.Module:
    """Read a UNet2DModel that diffusers or `save_unet` wrote, as float32, strictly, in eval mode."""
    from diffusers import UNet2DModel

    directory = Path(directory)
    config = read_json(directory / CONFIG)
    if not isinstance(config, dict) or config.get("_class_name") != "UNet2DModel":
        raise StorageError(
            f"{directory / CONFIG} does not describe a UNet2DModel; point to a diffusers unet directory"
        )
    unet: nn.Module = UNet2DModel.from_config(config)
    tensors, _ = read_tensors(directory / WEIGHTS)
    try:
        unet.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    except RuntimeError as error:
        raise StorageError(f"the weights in {directory} do not fit its config.json: {error}") from error
    return unet.eval()
