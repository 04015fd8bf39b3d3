"""Two processes give what one gives, but for rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fitting_run


@pytest.mark.long
def test_two_processes_agree_with_one(tmp_path):
    one = fitting_run.everything(tmp_path / "one")
    program = [fitting_run.__file__, str(tmp_path / "two")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(launch, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    two = torch.load(tmp_path / "two" / "results.pt", weights_only=True)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value.double(), two[name].double(), rtol=1e-3, atol=1e-4), name
