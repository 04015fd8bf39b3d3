"""What several test files share: the reference values, and the stand-in networks they were computed with."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from optcov.covariances import Covariance
from optcov.prediction import NoisePrediction
from optcov.schedule import Schedule
from reliability_runs import Inputs
from warm_commands import WarmCommands, not_flushed

# Some virtual machines announce AMX and do not allow it; a product of bfloat16 matrices then ends the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
ROOT = Path(__file__).parents[1]
# what tools and people leave at the root while tests run; anything else that appears there was written by a test
NOT_BY_TESTS = {".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".import_linter_cache", "__pycache__"}
NOT_BY_TESTS |= {".venv", "build", "dist", "site", "data", "runs"}

settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


def pytest_collection_finish() -> None:
    """What was imported stays to the end: every collection of garbage would look through it in vain."""
    gc.freeze()


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "golden" / "steps.json").read_text())


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmCommands]:
    """Commands in processes of their own, which can be killed."""
    server = WarmCommands(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """What the small runs of reliability_runs.py work on."""
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """A flush keeps files through a loss of power, which no test brings about; test_storage.py looks at the calls."""
    with mock.patch.object(os, "fsync", not_flushed):
        yield


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that draw plots and do not look at them: to paint one takes longer than a command on a tiny network."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, stream, **options: stream.write(b"picture"))


@pytest.fixture(autouse=True)
def nothing_new_at_the_root() -> Iterator[None]:
    """A test writes into its own tmp_path, never beside the code."""
    before = set(os.listdir(ROOT))
    yield
    new = set(os.listdir(ROOT)) - before - NOT_BY_TESTS
    assert not new, f"written into {ROOT}, where no test may write: {sorted(new)}"


@pytest.fixture(autouse=True)
def own_covariances() -> Iterator[None]:
    """A covariance that a test defines, or an example it runs, is forgotten with it."""
    with mock.patch.dict(Covariance.registry):
        yield


class Reference:
    """Inputs and closed-form networks of golden/steps.json, as its header defines them."""

    schedule = Schedule.linear()
    mean_square_noise = 0.2 + 0.7 * torch.arange(1001, dtype=torch.float64) / 1000

    def __init__(self) -> None:
        b, i, j = torch.meshgrid(*[torch.arange(n, dtype=torch.float64) for n in (2, 4, 4)], indexing="ij")
        self.x_t = torch.sin(0.7 * b + 0.3 * i + 0.5 * j + 0.1).unsqueeze(1)
        self.noise = torch.cos(1.3 * b + 0.9 * i + 0.4 * j).unsqueeze(1)
        levels = torch.round(127.5 + 100 * torch.sin(b + i + 2 * j)).clamp(0, 255).unsqueeze(1)
        self.x_0 = levels / 127.5 - 1

    @staticmethod
    def network(x: Tensor, t: Any) -> NoisePrediction:
        noise = 0.9 * torch.tanh(x * (1 + 0.001 * t))
        heads = {
            "npr": 0.2 + 0.1 * torch.cos(x + 0.002 * t),
            "sn": noise**2 + 0.3 + 0.1 * torch.sin(2 * x + 0.001 * t),
            "range": torch.tanh(x),
        }
        return NoisePrediction(noise, heads)

    # golden name -> (eta, covariance)
    covariances = {  # noqa: RUF012
        "DDPM_small": (1.0, "beta_tilde"),
        "DDPM_big": (1.0, "beta"),
        "DDPM_analytic": (1.0, "analytic"),
        "DDPM_NPR": (1.0, "npr"),
        "DDPM_SN": (1.0, "sn"),
        "DDPM_iddpm": (1.0, "range"),
        "DDIM_eta0_small": (0.0, "beta_tilde"),
        "DDIM_eta0_analytic": (0.0, "analytic"),
        "DDIM_eta0_NPR": (0.0, "npr"),
        "DDIM_eta0_SN": (0.0, "sn"),
        "DDIM_eta0.5_NPR": (0.5, "npr"),
    }

    @staticmethod
    def differs(value: Tensor, summary: dict[str, Any]) -> float:
        """Largest relative difference between a tensor and its recorded summary."""
        if "scalar" in summary:
            return _relative(float(value), summary["scalar"])
        value = value.expand(2, 1, 4, 4)
        entries = [value[0, 0, 0, 0], value[0, 0, 1, 2], value[1, 0, 2, 0], value[1, 0, 3, 3]]
        pairs = [(value.sum(), summary["sum"]), (value.square().sum(), summary["sumsq"])]
        return max(_relative(float(a), b) for a, b in [*pairs, *zip(entries, summary["entries"], strict=True)])


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-300) if a != b else 0.0


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()
