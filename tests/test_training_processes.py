"""Two processes give what one gives, but for rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optcov.fitting import Batches, fit_closed_form, gather, measure, new_heads, time_grid
from test_training import images, tiny_network, training


def everything(directory: Path) -> dict[str, torch.Tensor]:
    """Train, fit and measure; all that comes out, by name."""
    network = tiny_network()
    run = training(directory, network=network)
    list(run.run())
    tasks = new_heads(network, images().unit(torch.arange(1)), ["sn", "npr"], "timed")
    heads = fit_closed_form(network, tasks, Batches(images(), network.schedule, 16), images=64).heads
    numbers = gather(measure(network, images(), time_grid(network.schedule, 4), images=32, directory=directory / "m"))
    results = {**network.state_dict(), **numbers.tensors()}
    for name, head in heads.items():
        results |= {f"{name}.{key}": value for key, value in head.state_dict().items()}
    if run.accelerator.is_main_process:
        torch.save(results, directory / "results.pt")
    return results


@pytest.mark.long
def test_two_processes_agree_with_one(tmp_path):
    one = everything(tmp_path / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, str(tmp_path / "two")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(launch, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    two = torch.load(tmp_path / "two" / "results.pt", weights_only=True)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value.double(), two[name].double(), rtol=1e-3, atol=1e-4), name


if __name__ == "__main__":
    from optcov.processes import leave

    everything(Path(sys.argv[1]))
    leave()
