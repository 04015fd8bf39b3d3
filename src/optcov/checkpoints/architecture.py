"""The shape that the paper's six networks share, and the walk through it that every key table follows.

All are U-Nets of the same plan: levels of residual blocks, some with attention, a middle, and the way back
with one block more per level. They differ in names, and in what a family of networks (see the modules beside
this one) says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from optcov.checkpoints.errors import CheckpointError
from optcov.checkpoints.layout import State, Table

FIRST_ATTENTION = 16  # pixels: all six networks start to attend at this resolution
MAX_LEVELS, MAX_BLOCKS, MAX_WIDTH = 12, 64, 2**14  # far beyond any network of this kind


@final
@dataclass(frozen=True)
class Architecture:
    """What the keys and shapes of a checkpoint tell."""

    channels: tuple[int, ...]  # by level; level 0 has the full resolution
    blocks: int  # residual blocks per level on the way down
    attention: tuple[bool, ...]  # by level
    in_channels: int
    out_channels: int

    def __post_init__(self) -> None:
        widths = (*self.channels, self.in_channels, self.out_channels)
        if len(self.channels) > MAX_LEVELS or self.blocks > MAX_BLOCKS or not all(0 < w <= MAX_WIDTH for w in widths):
            raise CheckpointError(
                f"its keys describe {len(self.channels)} levels of {self.blocks} blocks, with at most {max(widths)} "
                f"and at least {min(widths)} channels, which no network of this kind has"
            )

    @property
    def multipliers(self) -> tuple[float, ...]:
        """Widths relative to that of level 0, which are the same in a narrower copy of a network."""
        return tuple(width / self.channels[0] for width in self.channels)

    @property
    def learned_range(self) -> bool:
        """Whether the output is noise and the v of Improved DDPM."""
        return has_learned_range(self.in_channels, self.out_channels)

    @property
    def image_size(self) -> int | None:
        """Height and width of the images; None if no level attends, so that the keys cannot tell."""
        return FIRST_ATTENTION * 2 ** self.attention.index(True) if any(self.attention) else None


def has_learned_range(channels: int, outputs: int) -> bool:
    """Whether a network has a learned range beside its noise, by its channels."""
    if outputs not in (channels, 2 * channels):
        raise CheckpointError(
            f"it turns {channels} channels into {outputs}; a noise prediction has as many as the image, or twice as "
            f"many with a learned range"
        )
    return outputs == 2 * channels


@final
@dataclass(frozen=True)
class Part:
    """One submodule on the walk."""

    kind: str  # "resnet" | "attention" | "resample"
    place: str  # "down" | "mid" | "up"
    level: int
    index: int  # among its kind, place and level
    ours: str  # its name in the UNet2DModel
    shortcut: bool = False  # whether a residual block has a 1x1 convolution beside it


@final
@dataclass(frozen=True)
class Family:
    """One kind of network code: how to recognise its keys, and how to say its networks in a UNet2DModel."""

    name: str
    marker: str  # a key that no other family has
    infer: Callable[[State], Architecture]
    table: Callable[[Architecture], Table]
    config: Mapping[str, Any]  # settings of the UNet beyond the architecture
    resample_type: str  # "conv" | "resnet"
    conv_head: Table
    residual_head: Table
    head_config: Mapping[str, Any]
    constants: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)  # dropped; remade on export


def walk(plan: Architecture, resample_shortcut: bool = False, single_up_attention: bool = False) -> Iterator[Part]:
    """Every residual block, attention and change of resolution, in the order of the forward pass."""
    last = len(plan.channels) - 1
    skips, width = [plan.channels[0]], plan.channels[0]
    for level, channels in enumerate(plan.channels):
        ours = f"down_blocks.{level}"
        for i in range(plan.blocks):
            yield Part("resnet", "down", level, i, f"{ours}.resnets.{i}", width != channels)
            width = channels
            skips.append(width)
            if plan.attention[level]:
                yield Part("attention", "down", level, i, f"{ours}.attentions.{i}")
        if level != last:
            yield Part("resample", "down", level, 0, f"{ours}.downsamplers.0", resample_shortcut)
            skips.append(width)
    yield Part("resnet", "mid", last, 0, "mid_block.resnets.0")
    yield Part("attention", "mid", last, 0, "mid_block.attentions.0")
    yield Part("resnet", "mid", last, 1, "mid_block.resnets.1")
    for level in range(last, -1, -1):
        ours, channels = f"up_blocks.{last - level}", plan.channels[level]
        for i in range(plan.blocks + 1):
            yield Part("resnet", "up", level, i, f"{ours}.resnets.{i}", width + skips.pop() != channels)
            width = channels
            if plan.attention[level] and (i == plan.blocks or not single_up_attention):
                yield Part("attention", "up", level, 0 if single_up_attention else i, f"{ours}.attentions.{i}")
        if level:
            yield Part("resample", "up", level, 0, f"{ours}.upsamplers.0", resample_shortcut)


def unet_config(family: Family, plan: Architecture, image_size: int) -> dict[str, Any]:
    """Config of the PaperUNet with this architecture."""
    plain, attending = ("", "Attn") if family.resample_type == "conv" else ("Resnet", "Attn")
    down, up = ("Down", "Up") if family.resample_type == "conv" else ("Downsample", "Upsample")
    return {
        "sample_size": image_size,
        "in_channels": plan.in_channels,
        "out_channels": plan.out_channels,
        "block_out_channels": plan.channels,
        "layers_per_block": plan.blocks,
        "down_block_types": tuple(f"{attending}DownBlock2D" if a else f"{plain}{down}Block2D" for a in plan.attention),
        "up_block_types": tuple(f"{attending}UpBlock2D" if a else f"{plain}{up}Block2D" for a in plan.attention[::-1]),
        "downsample_type": family.resample_type,
        "upsample_type": family.resample_type,
        **family.config,
    }


def dimension(state: State, key: str, axis: int = 0) -> int:
    """One length of a tensor that a checkpoint must have."""
    if key not in state:
        raise CheckpointError(f"the key {key} is missing, so the network's structure cannot be told")
    if state[key].ndim <= axis:
        raise CheckpointError(f"{key} has shape {tuple(state[key].shape)}, which no such network has")
    return state[key].shape[axis]


def equal_blocks(counts: list[int]) -> int:
    """The number of residual blocks per level, which must be the same at all levels."""
    if not counts or len(set(counts)) != 1 or counts[0] == 0:
        raise CheckpointError(
            f"the levels have {counts[:MAX_LEVELS]} residual blocks; a UNet2DModel has as many in each"
        )
    return counts[0]
