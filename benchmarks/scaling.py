"""What a fit, 50,000 samples and a likelihood table cost for four real networks: counted, not run.

    python benchmarks/scaling.py            print the tables
    python benchmarks/scaling.py --write    put them into docs/scaling.md
    python benchmarks/scaling.py --measure  first measure the slopes that the calculation rests on, in minutes

FLOPs of one evaluation are counted by torch on the "meta" device, where nothing is computed. A multiplication with an
addition counts as two. Evaluations are those of the defaults; rates are assumptions. A slope is that of the logarithm
of the CPU time of one thread, which other load changes little; 1 is proportional.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES = ROOT / "docs" / "scaling.md", ROOT / "measurements" / "scaling.jsonl"
BEGIN, END = "<!-- made by benchmarks/scaling.py: {} -->", "<!-- /made: {} -->"
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


SHAPE, CHANNELS = (1, 28, 28), (32, 64, 96)
TIMES = list(range(100, 1001, 100))  # of the likelihood table
AXES = {  # name -> what grows, and the words of the page
    "fit": "a fit, by its evaluations",
    "samples": "samples, by their evaluations",
    "table": "a likelihood table, by its evaluations",
    "network": "one evaluation, by its FLOPs",
}


def measure() -> list[dict[str, Any]]:
    """Sizes and seconds of each axis, as lines."""
    torch.set_num_threads(1)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    found = {"network": _by_flops(), **_by_evaluations()}
    return [{"name": name, "date": day, "sizes": found[name][0], "seconds": found[name][1]} for name in AXES]


def _by_flops() -> tuple[list[float], list[float]]:
    """Seconds of one image by U-Nets of four widths."""
    from optcov.networks.unet import build_unet

    flops, seconds = [], []
    for width in (16, 32, 64, 96):
        unet = build_unet(SHAPE, tuple(width * c // 32 for c in CHANNELS)).eval()
        x, t = torch.randn(8, *SHAPE), torch.full((8,), 500.0)
        with torch.no_grad():
            with FlopCounterMode(display=False) as counter:
                unet(x, t)
            seconds.append(min(_seconds(lambda: unet(x, t)) for _ in range(3)) / 8)  # noqa: B023
        flops.append(counter.get_total_flops() / 8)
    return flops, seconds


def _by_evaluations() -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of a fit, of samples and of a table at three sizes each; evaluations are counted at the network."""
    from diffusers import DDPMScheduler

    import optcov
    from optcov.networks.unet import build_unet

    unet = build_unet(SHAPE, CHANNELS).eval()
    images = torch.randint(0, 256, (256, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen = [0]

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, type(unet)):
            seen[0] += len(inputs[0])

    counting = torch.nn.modules.module.register_module_forward_pre_hook(count)

    def fit(size: int) -> Any:
        sizes = {"images": 64 * size, "measure_images": 8 * size, "times": 8, "calibration_samples": 64 * size}
        return optcov.fit((unet, DDPMScheduler()), images, progress=False, **sizes)

    bundle = fit(1)
    process = bundle.reverse_process("NPR-DDPM")
    work: dict[str, Callable[[int], object]] = {
        "fit": fit,
        "samples": lambda size: bundle.sample(32 * size, method="NPR-DDPM", steps=10, progress=False),
        "table": lambda size: optcov.cost_table(process, images[: 32 * size] / 127.5 - 1, times=TIMES),
    }
    found = {}
    for name, do in work.items():
        evaluations, seconds = [], []
        for size in (1, 2, 4):
            seen[0] = 0
            seconds.append(_seconds(lambda: do(size)))  # noqa: B023
            evaluations.append(float(seen[0]))
        found[name] = (evaluations, seconds)
    counting.remove()
    return found


def _seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def slope(line: Mapping[str, Any]) -> float:
    """Of log seconds over log size, by least squares."""
    logs = [torch.tensor(line[key], dtype=torch.float64).log().tolist() for key in ("sizes", "seconds")]
    return statistics.linear_regression(*logs).slope


def slopes(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row per axis."""
    rows = ["| CPU time of | from | to | slope | date |", "|---|---:|---:|---:|---|"]
    for line in lines:
        unit, scale = ("GFLOP", 1e9) if line["name"] == "network" else ("evaluations", 1.0)
        ends = (f"{float(format(line['sizes'][end] / scale, '.2g')):,g} {unit}" for end in (0, -1))
        rows.append("| " + " | ".join((AXES[line["name"]], *ends, f"{slope(line):.2f}", line["date"])) + " |")
    return "\n".join(rows)


def read() -> list[dict[str, Any]]:
    """What was measured."""
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]


def inserted(page: str, made: Mapping[str, str]) -> str:
    """The page with its parts in their places."""
    for name, part in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        page = f"{page.split(begin)[0]}{begin}\n{part}\n{end}{page.split(end)[1]}"
    return page


def main() -> None:
    """Measure if asked, print the tables, and write them where the page has their places."""
    if "--measure" in sys.argv[1:]:
        LINES.write_text("".join(json.dumps(line) + "\n" for line in measure()), encoding="utf-8")
    made = {"costs": table(), "slopes": slopes(read())}
    print(*made.values(), sep="\n\n")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(inserted(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
