"""What stage 2 costs: a step for SN and NPR together, as a ratio to a bare forward pass of the backbone.

    python benchmarks/stage2.py [--repeats 15] [--batch 64]

Ratios of medians of CPU time, interleaved within one process, so that a busy machine counts little. Measured are a
step of AdamW on convolution heads, and a pass of Fisher scoring, each with its own forward pass of the backbone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from optcov import ForwardProcess, Schedule
from optcov.fitting import Batch, HeadObjective, new_heads
from optcov.fitting.closed_form import Rows, apply, log_estimate, transposed_product
from optcov.fitting.objectives import observe
from optcov.networks import Backbone, HeadedNetwork
from optcov.networks.unet import build_unet


def main() -> None:
    """Print a line of JSON with the ratios and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    print(json.dumps(run(options.repeats, options.batch)))


def run(repeats: int, batch_size: int) -> dict[str, float]:
    """Medians in seconds, and their ratios to the bare forward pass."""
    unet = build_unet((1, 28, 28))
    network = HeadedNetwork(Backbone.of(unet), Schedule.vp_sde()).eval().requires_grad_(False)
    process = ForwardProcess(network.schedule)
    x_0 = torch.rand(batch_size, 1, 28, 28) * 2 - 1
    batch = Batch(x_0, torch.rand(batch_size).double().clamp(min=1e-5), torch.randn_like(x_0))
    x_t = process.diffuse(batch.x_0, batch.times, batch.noise)
    argument = 999 * batch.times.float()

    @torch.no_grad()
    def bare() -> None:
        unet(x_t, argument)

    work: dict[str, Callable[[], None]] = {
        "forward": bare,
        "adamw": gradient_step(network, batch),
        "fisher": scoring_pass(network, process, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 2):
        for name, function in work.items():
            started = time.process_time()
            function()
            if repeat >= 2:  # the first calls warm up
                seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {f"{name}_ratio": medians[name] / medians["forward"] for name in ("adamw", "fisher")}
    return {name: round(value, 4) for name, value in {**ratios, **medians}.items()}


def gradient_step(network: HeadedNetwork, batch: Batch) -> Callable[[], None]:
    """One step of AdamW on SN and NPR convolution heads."""
    tasks = new_heads(network, batch.x_0[:1], ["sn", "npr"], "conv")
    objective = HeadObjective(network, tasks)
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        objective(batch).mean().backward()
        optimizer.step()

    return step


def scoring_pass(network: HeadedNetwork, process: ForwardProcess, batch: Batch) -> Callable[[], None]:
    """One batch of a pass of Fisher scoring for SN and NPR."""
    tasks = new_heads(network, batch.x_0[:1], ["sn", "npr"], "conv")
    heads = {name: task.module for name, task in tasks.items()}
    weights = torch.zeros(9 * 32 + 1, 1, dtype=torch.float64)

    @torch.no_grad()
    def score() -> None:
        example, output = observe(network, process, batch)
        inputs = heads["sn"].inputs(output.features)
        regressions = {name: task.regression(example) for name, task in tasks.items()}
        rows = Rows(inputs, batch.times, example.log_snr, regressions)
        for name, head in heads.items():
            log_g = log_estimate(head, rows, regressions[name], apply(head, rows, weights))
            transposed_product(head, rows, regressions[name].target * torch.exp(-log_g) - 1)

    return score


if __name__ == "__main__":
    main()
