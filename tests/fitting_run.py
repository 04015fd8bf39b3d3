"""A run that trains, fits and measures; as a script, for tests that need several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from optcov.fitting import Batches, fit_closed_form, measure, new_heads, numbers_per_time, time_grid
from tiny_training import images, tiny_network, training


def everything(directory: Path) -> dict[str, torch.Tensor]:
    """Train, fit and measure; all that comes out, by name."""
    network = tiny_network()
    run = training(directory, network=network)
    list(run.run())
    tasks = new_heads(network, images().x_0(torch.arange(1)), ["sn", "npr"], "timed")
    heads = fit_closed_form(network, tasks, Batches(images(), network.schedule, 16), images=64).heads
    numbers = numbers_per_time(
        measure(network, images(), time_grid(network.schedule, 4), images=32, directory=directory / "m")
    )
    results = {**network.state_dict(), **numbers.tensors()}
    for name, head in heads.items():
        results |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
    if run.accelerator.is_main_process:
        torch.save(results, directory / "results.pt")
    return results


if __name__ == "__main__":
    from optcov.processes import leave

    everything(Path(sys.argv[1]))
    leave()
