"""A sweep by a closed-form network; as a script, for tests that need several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from optcov import ForwardProcess, ReverseProcess, Schedule, oracle
from optcov.likelihood import Sweep, merge_processes


def oracle_table(directory: Path, rank: int = 0, ranks: int = 1) -> None:
    """A sweep by a closed-form network, over the processes of this run; the first writes the sums."""
    data = oracle.GaussianMixture([0.5, 0.5], [[-0.5] * 4, [0.4] * 4], [0.02, 0.05])
    schedule = Schedule.linear(50)
    process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), data_range=None)
    sweep = Sweep(process, data.sample(24).double(), shard=(rank, ranks), batch_size=5)
    for _ in sweep:
        pass
    table = merge_processes(sweep.table, ranks)
    if rank == 0:
        costs = {name: torch.as_tensor(np.asarray(table.costs(name))) for name in table.covariances}
        torch.save({"ranks": torch.tensor(ranks), **costs}, directory / "costs.pt")


if __name__ == "__main__":
    from optcov.processes import leave, this_process

    state = this_process()
    oracle_table(Path(sys.argv[1]), state.process_index, state.num_processes)
    leave()
