"""What a fit, 50,000 samples and a likelihood table cost for four real networks: counted, not run.

    python benchmarks/scaling.py            print the table
    python benchmarks/scaling.py --write    put it into docs/scaling.md

FLOPs of one evaluation are counted by torch on the "meta" device, where nothing is computed. A multiplication with an
addition counts as two. Evaluations are those of the defaults; rates are assumptions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- made by benchmarks/scaling.py -->", "<!-- /made -->"
FIT = 4096 + 96 * 100 + 2048  # training.md, "What a fit costs"
SAMPLES = 50_000 * 25
SCORED = (1000 + 1000) * 1000  # images that choose and images that are scored, at all 1,000 times
GPUS = (1, 8)


@dataclass(frozen=True)
class Model:
    """A network, one input for it, and the rate that a GPU is assumed to sustain."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]
    rate: float  # FLOP/s

    def count(self) -> tuple[float, float]:
        """Weights, and FLOPs of one evaluation."""
        with torch.device("meta"), torch.no_grad():
            module = self.make().eval()
            tensors, named = self.inputs()
            with FlopCounterMode(display=False) as counter:
                module(*tensors, **named)
        return sum(p.numel() for p in module.parameters()), counter.get_total_flops()


def _cifar10() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(  # google/ddpm-cifar10-32
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        norm_eps=1e-6,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
    )


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8)


def _sd15() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True)  # the defaults are those of Flux.1


def _flux_inputs() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    tokens, words = 64 * 64, 512
    named = {"encoder_hidden_states": torch.zeros(1, words, 4096), "pooled_projections": torch.zeros(1, 768)}
    named |= {"timestep": torch.zeros(1), "guidance": torch.zeros(1)}
    named |= {"img_ids": torch.zeros(tokens, 3), "txt_ids": torch.zeros(words, 3)}
    return (torch.zeros(1, tokens, 64),), named


def _sd_inputs() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return (torch.zeros(1, 4, 64, 64), torch.zeros(1), torch.zeros(1, 77, 768)), {}


def _dit_inputs() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    whole = torch.zeros(1, dtype=torch.long)
    return (torch.zeros(1, 4, 32, 32),), {"timestep": whole, "class_labels": whole}


def _cifar10_inputs() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return (torch.zeros(1, 3, 32, 32), torch.zeros(1)), {}


MODELS = (
    Model("DDPM, CIFAR-10, 32x32", _cifar10, _cifar10_inputs, 10e12),
    Model("DiT-XL/2, 256x256", _dit, _dit_inputs, 100e12),
    Model("Stable Diffusion 1.5, 512x512", _sd15, _sd_inputs, 100e12),
    Model("Flux.1, 1024x1024", _flux, _flux_inputs, 100e12),
)


def duration(seconds: float) -> str:
    """For the eye: two digits and a unit."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{float(f'{seconds / length:.2g}'):g} {unit}"
    return f"{float(f'{seconds:.2g}'):g} s"


def table() -> str:
    """Markdown: a row per model and number of GPUs."""
    header = "| model | weights | GFLOP per evaluation | GPUs | fit | 50,000 samples, 25 steps | likelihood table |"
    lines = [header, "|---|---:|---:|---:|---:|---:|---:|"]
    for model in MODELS:
        weights, flops = model.count()
        for gpus in GPUS:
            each = flops / model.rate / gpus
            name = (model.name, f"{weights / 1e6:,.0f} M", f"{flops / 1e9:,.0f}") if gpus == GPUS[0] else ("", "", "")
            costs = (duration(count * each) for count in (FIT, SAMPLES, SCORED))
            lines.append("| " + " | ".join((*name, str(gpus), *costs)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write it where the page has its place."""
    made = table()
    print(made)
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
