"""The U-Net of DDPM in PyTorch: CelebA 64x64 (the DDIM repository) and LSUN Bedroom (pytorch_diffusion).

Levels are numbered by resolution on both ways, so that up.0 comes last. Attention has one head and
convolutions of one pixel; downsampling pads below and to the right only. UNet2DModel says all of this.
"""

from __future__ import annotations

from itertools import takewhile

from optcov.checkpoints.architecture import (
    MAX_BLOCKS,
    MAX_LEVELS,
    Architecture,
    Family,
    Part,
    dimension,
    equal_blocks,
    walk,
)
from optcov.checkpoints.layout import Entry, State, Table, layers, pointwise, weight_and_bias

RESNET = {"norm1": "norm1", "conv1": "conv1", "temb_proj": "time_emb_proj", "norm2": "norm2", "conv2": "conv2"}
HEAD = {"norm_out2": "norm", "conv_out2": "conv"}
ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


def infer(state: State) -> Architecture:
    """Read the architecture off the keys of the way down."""
    levels = list(takewhile(lambda i: f"down.{i}.block.0.conv1.weight" in state, range(MAX_LEVELS + 1)))
    blocks = [sum(f"down.{i}.block.{j}.conv1.weight" in state for j in range(MAX_BLOCKS + 1)) for i in levels]
    return Architecture(
        tuple(dimension(state, f"down.{i}.block.0.conv1.weight") for i in levels),
        equal_blocks(blocks),
        tuple(f"down.{i}.attn.0.q.weight" in state for i in levels),
        in_channels=dimension(state, "conv_in.weight", 1),
        out_channels=dimension(state, "conv_out.weight"),
    )


def table(plan: Architecture) -> Table:
    """Every key of the network and what it is in ours."""
    times = {"temb.dense.0": "time_embedding.linear_1", "temb.dense.1": "time_embedding.linear_2"}
    entries = layers(times | {"conv_in": "conv_in"})
    for part in walk(plan):
        prefix = _prefix(part)
        if part.kind == "resnet":
            names = RESNET | ({"nin_shortcut": "conv_shortcut"} if part.shortcut else {})
            entries += layers(names, f"{prefix}.", f"{part.ours}.")
        elif part.kind == "attention":
            entries += _attention(prefix, part.ours)
        else:
            entries += weight_and_bias(f"{prefix}.conv", f"{part.ours}.conv")
    return (*entries, *layers({"norm_out": "conv_norm_out", "conv_out": "conv_out"}))


def _prefix(part: Part) -> str:
    if part.place == "mid":
        return f"mid.block_{part.index + 1}" if part.kind == "resnet" else "mid.attn_1"
    if part.kind == "resample":
        return f"{part.place}.{part.level}.{part.place}sample"
    return f"{part.place}.{part.level}.{'block' if part.kind == 'resnet' else 'attn'}.{part.index}"


def _attention(foreign: str, ours: str) -> list[Entry]:
    entries = weight_and_bias(f"{foreign}.norm", f"{ours}.group_norm")
    for a, b in ATTENTION.items():
        entries.append(Entry(f"{foreign}.{a}.weight", (f"{ours}.{b}.weight",), pointwise(2)))
        entries.append(Entry(f"{foreign}.{a}.bias", (f"{ours}.{b}.bias",)))
    return entries


DDPM = Family(
    name="ddpm",
    marker="temb.dense.0.weight",
    infer=infer,
    table=table,
    config={"norm_eps": 1e-6, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1},
    resample_type="conv",
    conv_head=tuple(layers(HEAD)),
    residual_head=(*layers(RESNET | {"temb_proj": "time"}, "before_out."), *layers(HEAD)),
    head_config={"eps": 1e-6},
)
