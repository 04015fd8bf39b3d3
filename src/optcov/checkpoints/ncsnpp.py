"""score_sde's DDPM++ (NCSN++ with positional times, no FIR filter): CIFAR10 (VP SDE).

Everything is numbered in the order of the forward pass (all_modules). Residual sums are divided by sqrt(2),
changes of resolution are residual blocks with a shortcut, and an ascending level has one attention. Attention
multiplies by its matrices from the right.
"""

from __future__ import annotations

import math
from itertools import count

import torch
from torch import Tensor

from optcov.checkpoints.architecture import Architecture, Family, dimension, equal_blocks, walk
from optcov.checkpoints.errors import CheckpointError
from optcov.checkpoints.layout import TRANSPOSED, Entry, State, Table, layers, weight_and_bias

RESNET = {
    "GroupNorm_0": "norm1",
    "Conv_0": "conv1",
    "Dense_0": "time_emb_proj",
    "GroupNorm_1": "norm2",
    "Conv_1": "conv2",
}
ATTENTION = {"NIN_0": "to_q", "NIN_1": "to_k", "NIN_2": "to_v", "NIN_3": "to_out.0"}
FIRST_BLOCK = 3  # after two linear layers for the time and the first convolution
SIGMAS = (50.0, 0.01, 1000)  # of the constant buffer, which the positional network never uses


def infer(state: State) -> Architecture:
    """Read the architecture off the modules before the first that takes a skip, the middle's three apart."""
    kinds: list[str] = []
    widths: list[int] = []
    for n in count(FIRST_BLOCK):
        prefix = f"all_modules.{n}"
        if f"{prefix}.NIN_0.W" in state:
            kinds.append("attention")
            widths.append(dimension(state, f"{prefix}.NIN_0.W"))
            continue
        width, incoming = (dimension(state, f"{prefix}.Conv_0.weight", axis) for axis in (0, 1))
        if incoming > width:
            break
        resamples = incoming == width and f"{prefix}.Conv_2.weight" in state
        kinds.append("resample" if resamples else "resnet")
        widths.append(width)
    if kinds[-3:] != ["resnet", "attention", "resnet"]:
        raise CheckpointError(f"the middle of the network is {kinds[-3:]}, not a block, an attention and a block")
    return _architecture(state, kinds[:-3], widths[:-3], last=n)


def _architecture(state: State, kinds: list[str], widths: list[int], last: int) -> Architecture:
    levels: list[list[tuple[str, int]]] = [[]]
    for kind, width in zip(kinds, widths, strict=True):
        if kind == "resample":
            levels.append([])
        else:
            levels[-1].append((kind, width))
    blocks = equal_blocks([sum(kind == "resnet" for kind, _ in level) for level in levels])
    out = next((n for n in count(last) if f"all_modules.{n}.weight" in state or n > len(state)), last) + 1
    return Architecture(
        tuple(level[-1][1] for level in levels),
        blocks,
        tuple(any(kind == "attention" for kind, _ in level) for level in levels),
        in_channels=dimension(state, f"all_modules.{FIRST_BLOCK - 1}.weight", 1),
        out_channels=dimension(state, f"all_modules.{out}.weight"),
    )


def table(plan: Architecture) -> Table:
    """Every key of the network and what it is in ours."""
    first = {"0": "time_embedding.linear_1", "1": "time_embedding.linear_2", "2": "conv_in"}
    entries = layers(first, "all_modules.")
    number = FIRST_BLOCK
    for part in walk(plan, resample_shortcut=True, single_up_attention=True):
        prefix = f"all_modules.{number}"
        number += 1
        if part.kind == "attention":
            entries += _attention(prefix, part.ours)
        else:
            names = RESNET | ({"Conv_2": "conv_shortcut"} if part.shortcut else {})
            entries += layers(names, f"{prefix}.", f"{part.ours}.")
    return (*entries, *layers({str(number): "conv_norm_out", str(number + 1): "conv_out"}, "all_modules."))


def _attention(foreign: str, ours: str) -> list[Entry]:
    entries = weight_and_bias(f"{foreign}.GroupNorm_0", f"{ours}.group_norm")
    for a, b in ATTENTION.items():
        entries.append(Entry(f"{foreign}.{a}.W", (f"{ours}.{b}.weight",), TRANSPOSED))
        entries.append(Entry(f"{foreign}.{a}.b", (f"{ours}.{b}.bias",)))
    return entries


def _sigmas() -> Tensor:
    high, low, steps = SIGMAS
    return torch.linspace(math.log(high), math.log(low), steps, dtype=torch.float64).exp()


NCSNPP = Family(
    name="score_sde",
    marker="all_modules.0.weight",
    infer=infer,
    table=table,
    config={
        "norm_eps": 1e-6,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "residual_scale": math.sqrt(2),
        "resample_shortcut": True,
        "single_up_attention": True,
        "channels_per_group": 4,
    },
    resample_type="resnet",
    conv_head=tuple(layers({"gn_out2": "norm", "conv_out2": "conv"})),
    residual_head=(),  # the authors trained none
    head_config={"eps": 1e-6},
    constants={"sigmas": _sigmas},
)
