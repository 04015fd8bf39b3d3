"""Checkpoints as their authors write them, with the deterministic weights of tests/golden/networks.json."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


@cache
def golden_networks() -> dict[str, Any]:
    return json.loads((GOLDEN / "networks.json").read_text())["nets"]


@cache
def full_size_networks() -> dict[str, Any]:
    return json.loads(gzip.decompress((GOLDEN / "network_keys_full_size.json.gz").read_bytes()))["nets"]


def filled(key: str, shape: list[int]) -> Tensor:
    """The fill that the header of networks.json describes."""
    values = np.random.RandomState(zlib.crc32(key.encode()) & 0xFFFFFFFF).randn(*shape)
    if len(shape) > 1:
        values = values / math.sqrt(math.prod(shape[1:]))
    elif key.endswith(".weight"):
        values = 1 + 0.1 * values
    else:
        values = 0.05 * values
    return torch.tensor(values, dtype=torch.float32)


@cache
def _golden_state(name: str) -> dict[str, Tensor]:
    return {
        key: torch.zeros(shape, dtype=torch.float64) if key == "sigmas" else filled(key, shape)
        for key, shape, _ in golden_networks()[name]["keys"]
    }


def golden_state(name: str) -> dict[str, Tensor]:
    """A state_dict of the network, in the order of its keys."""
    return dict(_golden_state(name))


def golden_input(size: int) -> Tensor:
    b, c, i, j = np.ogrid[:2, :3, :size, :size]
    return torch.tensor(np.sin(0.7 * b + 0.9 * c + 0.13 * i + 0.29 * j + 0.1), dtype=torch.float32)


def golden_entries(output: Tensor) -> Tensor:
    size = output.shape[-1]
    places = [
        (0, 0, 0, 0),
        (0, 1, 1, 2),
        (0, 2, size // 2, size // 2),
        (0, 0, size - 1, 0),
        (1, 0, 0, size - 1),
        (1, 1, 3, 5),
        (1, 2, size - 1, size - 1),
        (1, 2, size // 2 - 1, size // 4),
    ]
    return torch.stack([output[place] for place in places])


GOLDEN_TIMES = torch.tensor([3.0, 700.0])  # the network's own time argument


def prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As DataParallel saves it."""
    return {f"module.{key}": value for key, value in state.items()}


def spoiled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that must not be taken where there are averages of them."""
    return {key: torch.zeros_like(value) for key, value in state.items()}


def as_ddim(state: dict[str, Tensor]) -> list[Any]:
    """The DDIM repository's list: model, optimizer, epoch, step, averages."""
    return [prefixed(spoiled(state)), {"state": {}, "param_groups": [{"lr": 2e-4}]}, 7, 500, state]


def as_score_sde(state: dict[str, Tensor]) -> dict[str, Any]:
    """score_sde's dictionary, with averages as a list."""
    shadows = [value for key, value in state.items() if key != "sigmas"]
    ema = {"decay": 0.9999, "num_updates": 3, "shadow_params": shadows}
    return {"optimizer": {"state": {}}, "model": prefixed(spoiled(state)), "ema": ema, "step": 3}


def as_analytic_dpm(state: dict[str, Tensor]) -> dict[str, Any]:
    return {"models_states": {"eps_model": state}, "step": 500_000}
