"""Which processes share the work: what Accelerate is asked, and what several processes on CPUs are told."""

from __future__ import annotations

import socket
import subprocess

import pytest

from two_processes import ENVIRONMENT, LAUNCH

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ASK = """
import os
from optcov.processes import accelerator, leave, this_process
first = this_process()
engine = accelerator()
answer = first.process_index, first.num_processes, engine.process_index, engine.num_processes, first.device.type
os.write(1, (" ".join(map(str, answer)) + "\\n").encode())  # at once: the other process writes there, too
engine.wait_for_everyone()  # one that leaves at once would close the connection while the other opens it
leave()
import torch
assert not torch.distributed.is_initialized()
"""


def test_a_process_alone_is_the_only_one(commands, tmp_path):
    ended = commands.start_code(ASK, cwd=tmp_path, environment={"ACCELERATE_USE_CPU": "true"}).wait()
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["0 1 0 1 cpu"]


def test_two_processes_on_cpus_know_of_each_other(commands, tmp_path):
    """Unasked: Accelerate itself, asked for a PartialState, would look for GPUs only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = [
        commands.start_code(ASK, cwd=tmp_path, environment={**job, "RANK": rank, "LOCAL_RANK": rank, **NO_GPU})
        for rank in ("0", "1")
    ]
    ended = [process.wait() for process in running]
    assert [end.code for end in ended] == [0, 0], ended
    assert [end.out.strip() for end in ended] == ["0 2 0 2 cpu", "1 2 1 2 cpu"]


@pytest.mark.long
@pytest.mark.parametrize("asked", [True, False])
def test_two_processes_that_accelerate_launches_know_of_each_other(tmp_path, asked):
    environment = {**ENVIRONMENT, **NO_GPU}
    if not asked:
        del environment["ACCELERATE_USE_CPU"]
    (tmp_path / "ask.py").write_text(ASK)
    ended = subprocess.run(
        [*LAUNCH, str(tmp_path / "ask.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 2 0 2 cpu", "1 2 1 2 cpu"]
