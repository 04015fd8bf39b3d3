"""improved-diffusion's U-Net: CIFAR10 (LS), CIFAR10 (CS) and ImageNet 64x64.

Blocks are numbered along the way down (input_blocks) and up (output_blocks), with what follows a residual
block in the same number: input_blocks.5.0 is a residual block, input_blocks.5.1 its attention. Time scales and
shifts the second norm; attention has 4 heads.
"""

from __future__ import annotations

from itertools import count

from optcov.checkpoints.architecture import Architecture, Family, dimension, equal_blocks, walk
from optcov.checkpoints.layout import Entry, State, Table, headwise_qkv, layers, pointwise, weight_and_bias

HEADS = 4

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
}


def infer(state: State) -> Architecture:
    """Read the architecture off the keys of the way down."""
    channels: list[int] = []
    blocks, attention = [0], [False]
    for n in count(1):
        if f"input_blocks.{n}.0.op.weight" in state:
            blocks.append(0)
            attention.append(False)
        elif f"input_blocks.{n}.0.in_layers.0.weight" in state:
            width = dimension(state, f"input_blocks.{n}.0.out_layers.0.weight")
            channels += [width] * (len(blocks) - len(channels))
            blocks[-1] += 1
            attention[-1] |= f"input_blocks.{n}.1.qkv.weight" in state
        else:
            break
    return Architecture(
        tuple(channels),
        equal_blocks(blocks),
        tuple(attention),
        in_channels=dimension(state, "input_blocks.0.0.weight", 1),
        out_channels=dimension(state, "out.2.weight"),
    )


def table(plan: Architecture) -> Table:
    """Every key of the network and what it is in ours."""
    times = {"time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2"}
    entries = layers(times | {"input_blocks.0.0": "conv_in"})
    numbers = {"down": 0, "mid": -1, "up": -1}  # of the last numbered block
    position = 0
    for part in walk(plan):
        starts = part.kind == "resnet" or (part.kind == "resample" and part.place == "down")
        if part.place == "mid":
            numbers["mid"] += 1
            prefix = f"middle_block.{numbers['mid']}"
        else:
            numbers[part.place] += starts
            position = 0 if starts else position + 1
            prefix = f"{'input' if part.place == 'down' else 'output'}_blocks.{numbers[part.place]}.{position}"
        if part.kind == "resnet":
            names = RESNET | ({"skip_connection": "conv_shortcut"} if part.shortcut else {})
            entries += layers(names, f"{prefix}.", f"{part.ours}.")
        elif part.kind == "attention":
            entries += _attention(prefix, part.ours)
        else:
            entries += weight_and_bias(f"{prefix}.{'op' if part.place == 'down' else 'conv'}", f"{part.ours}.conv")
    return (*entries, *layers({"out.0": "conv_norm_out", "out.2": "conv_out"}))


def _attention(foreign: str, ours: str) -> list[Entry]:
    def queries(name: str) -> tuple[str, ...]:
        return tuple(f"{ours}.to_{part}.{name}" for part in "qkv")

    return [
        *weight_and_bias(f"{foreign}.norm", f"{ours}.group_norm"),
        Entry(f"{foreign}.qkv.weight", queries("weight"), headwise_qkv(HEADS, 1)),
        Entry(f"{foreign}.qkv.bias", queries("bias"), headwise_qkv(HEADS, 0)),
        Entry(f"{foreign}.proj_out.weight", (f"{ours}.to_out.0.weight",), pointwise(1)),
        Entry(f"{foreign}.proj_out.bias", (f"{ours}.to_out.0.bias",)),
    ]


IMPROVED_DIFFUSION = Family(
    name="improved-diffusion",
    marker="time_embed.0.weight",
    infer=infer,
    table=table,
    config={
        "resnet_time_scale_shift": "scale_shift",
        "attention_heads": HEADS,
        "attn_norm_num_groups": 32,
        "norm_eps": 1e-5,
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
    },
    resample_type="conv",
    conv_head=tuple(layers({"out2.0": "norm", "out2.2": "conv"})),
    residual_head=(
        *layers(RESNET | {"emb_layers.1": "time"}, "out2.0."),
        *layers({"out2.1": "norm", "out2.3": "conv"}),
    ),
    head_config={"eps": 1e-5, "scale_shift": True},
)
