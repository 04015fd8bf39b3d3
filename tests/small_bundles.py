"""A bundle of a few thousand weights, for the tests of everything that loads one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from optcov import Schedule
from optcov.bundle import Bundle, NumbersPerTime
from optcov.networks import Backbone, ConvHead, HeadedNetwork

SHAPE = (1, 8, 8)


def small_unet(seed: int = 0, **options: object) -> nn.Module:
    from diffusers import UNet2DModel

    settings: dict[str, object] = {
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet: nn.Module = UNet2DModel(**{**settings, **options})
    return unet.eval()


def small_head(seed: int = 0) -> ConvHead:
    head = ConvHead(8, 1, groups=4)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        nn.init.normal_(head.conv.weight, std=0.1)
    return head


def small_numbers(schedule: Schedule) -> NumbersPerTime:
    count = schedule.steps or 100
    times = torch.arange(1, count + 1, dtype=torch.float64) / (1 if schedule.steps else count)
    share = torch.linspace(0, 1, count, dtype=torch.float64)
    return NumbersPerTime(times, 0.2 + 0.7 * share, 0.9 - 0.8 * share, 0.01 + 0 * share, 0.02 + 0 * share)


def small_bundle(schedule: Schedule | None = None) -> Bundle:
    schedule = schedule or Schedule.vp_sde()
    plain = Bundle(HeadedNetwork(Backbone.of(small_unet()), schedule).eval(), SHAPE, name="small")
    heads = {"npr": small_head(1), "sn": small_head(2)}
    return plain.with_heads(heads, plain.fingerprint).with_numbers(small_numbers(schedule))


def save_with_images(directory: Path, schedule: Schedule, images: int = 40) -> Path:
    """A bundle as small/ and random images as images.npy in a directory."""
    small_bundle(schedule).save(directory / "small")
    pixels = np.random.default_rng(0).integers(0, 256, (images, *SHAPE), dtype=np.uint8)
    np.save(directory / "images.npy", pixels)
    return directory
