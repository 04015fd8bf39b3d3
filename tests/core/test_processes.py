"""Which processes share the work: what Accelerate is asked, and what several processes on CPUs are told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from two_processes import ENVIRONMENT, LAUNCH

ASK = """
import os
from optcov.processes import accelerator, leave, this_process
first = this_process()
engine = accelerator()
answer = first.process_index, first.num_processes, engine.process_index, engine.num_processes, first.device.type
os.write(1, (" ".join(map(str, answer)) + "\\n").encode())  # at once: the other process writes there, too
leave()
import torch
assert not torch.distributed.is_initialized()
"""


def ask(program: list[str], environment: dict[str, str], tmp_path) -> list[str]:
    (tmp_path / "ask.py").write_text(ASK)
    ended = subprocess.run(
        [*program, str(tmp_path / "ask.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


def test_a_process_alone_is_the_only_one(tmp_path):
    assert ask([sys.executable], dict(ENVIRONMENT), tmp_path) == ["0 1 0 1 cpu"]


@pytest.mark.parametrize("asked", [pytest.param(True, marks=pytest.mark.long), False])
def test_two_processes_on_cpus_know_of_each_other(tmp_path, asked):
    """Whichever question comes first: asked for a PartialState, Accelerate itself would look for GPUs only."""
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    if not asked:
        del environment["ACCELERATE_USE_CPU"]
    assert ask(LAUNCH, environment, tmp_path) == ["0 2 0 2 cpu", "1 2 1 2 cpu"]
