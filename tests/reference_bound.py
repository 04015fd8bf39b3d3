"""The process and the images of the authors' bounds in golden/steps.json, and a mixture with an exact likelihood."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, oracle

GOLDEN = json.loads((Path(__file__).parent / "golden" / "steps.json").read_text())
RANGE = torch.arange(4, dtype=torch.float64)
BATCH = torch.arange(2, dtype=torch.float64)[:, None, None, None]
ROW, COLUMN = RANGE[None, None, :, None], RANGE[None, None, None, :]
X_0 = (127.5 + 100 * torch.sin(BATCH + ROW + 2 * COLUMN)).round().clamp(0, 255) / 127.5 - 1
NOISE = torch.cos(1.3 * BATCH + 0.9 * ROW + 0.4 * COLUMN)
MIXTURE = oracle.GaussianMixture(
    [0.6, 0.4],
    [[-0.5, 0.2], [0.7, -0.4]],
    torch.tensor([[[0.3, 0.2], [0.2, 0.25]], [[0.1, -0.05], [-0.05, 0.2]]]),
)


def reference_network(x, t):
    noise = 0.9 * torch.tanh(x * (1 + 0.001 * t))
    heads = {
        "npr": 0.2 + 0.1 * torch.cos(x + 0.002 * t),
        "sn": noise.square() + 0.3 + 0.1 * torch.sin(2 * x + 0.001 * t),
        "range": torch.tanh(x),
    }
    return NoisePrediction(noise, heads)


def reference_process(covariance, clip, steps=1000):
    schedule = Schedule.linear(steps)
    gamma = 0.2 + 0.7 * torch.arange(steps + 1, dtype=torch.float64) / steps
    return ReverseProcess(
        reference_network,
        ForwardProcess(schedule),
        covariance,
        data_range=(-1, 1) if clip else None,
        mean_square_noise=gamma if covariance == "analytic" else None,
    )
