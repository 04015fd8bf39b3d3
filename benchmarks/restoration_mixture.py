"""Restoration against the exact posterior: a mixture of Gaussians in two dimensions, one number measured.

    python benchmarks/restoration_mixture.py [--points 1000] [--record FILE]

The posterior given the measurement is a mixture, too. For each covariance, with the exact network:

coverage   the share of true numbers inside the intervals of 19 samples; 0.5 and 0.9 are right
bias       squared error of the samples' mean beyond what 19 samples explain, over the posterior's variance; 0 is right
spread     mean variance of the samples over that of the posterior; 1 is right
distance   2-Wasserstein distance of 400 samples to as many exact ones, at three measurements
"""

from __future__ import annotations

import argparse
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from optcov import ForwardProcess, ReverseProcess, Schedule, oracle
from optcov.covariances import BySpectrum, Example, find_covariance
from optcov.inverse import Linear, restore
from optcov.inverse.scores import coverage
from optcov.prediction import Prediction

MIXTURE = oracle.GaussianMixture(
    [0.3, 0.4, 0.3], [[-1.5, 0.5], [0.5, 1.0], [1.0, -1.2]], [[[0.2, 0.1], [0.1, 0.3]]] * 3
)
SCHEDULE = Schedule.linear()
A = torch.tensor([[1.0, 0.4]], dtype=torch.float64)
OPERATOR = Linear(lambda x: x @ A.to(x).mT, lambda y: y @ A.to(y), (2,), "matrix")
NOISE_STD = 0.4
STEPS, SAMPLES, DRAWN = 40, 19, 400
MEASURED = (-1.0, 0.0, 1.0)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "full, exact": ("npr_full", {}),
    "full, exact, 160 steps": ("npr_full", {"steps": 160}),
    "NPR, guidance": ("npr", {"way": "guidance"}),
    "NPR, proximal": ("npr", {"way": "proximal"}),
    "SN, guidance": ("sn", {"way": "guidance"}),
    "SN, proximal": ("sn", {"way": "proximal"}),
    "correlated NPR, guidance": ("npr_correlated", {"way": "guidance"}),
    "correlated NPR, proximal": ("npr_correlated", {"way": "proximal"}),
    "one variance per timestep, guidance": ("npr_isotropic", {"way": "guidance"}),
    "one variance per timestep, proximal": ("npr_isotropic", {"way": "proximal"}),
    "PiGDM": ("npr_full", {"method": "PiGDM"}),
    "DPS, strength 1": ("npr_full", {"method": "DPS"}),
    "DiffPIR, strength 10": ("npr_full", {"method": "DiffPIR"}),
}


def posterior(y: Tensor) -> oracle.GaussianMixture:
    """The mixture given one measurement (1,): each component conditioned, weighted by how likely y is."""
    S = MIXTURE.covariances[0]
    inner = A @ S @ A.T + NOISE_STD**2 * torch.eye(1, dtype=torch.float64)
    gain = S @ A.T @ torch.linalg.inv(inner)
    left = y - MIXTURE.means @ A.T
    log_weights = MIXTURE.weights.log() - 0.5 * (left @ torch.linalg.inv(inner) * left).sum(1)
    covariance = S - gain @ A @ S
    return oracle.GaussianMixture(log_weights.softmax(0), MIXTURE.means + left @ gain.T, covariance.expand(3, 2, 2))


def moments(y: Tensor) -> tuple[Tensor, Tensor]:
    """Exact mean and variances of each posterior, (n, 2) each, of measurements (n, 1)."""
    found = [posterior(each) for each in y]
    means = torch.stack([one.weights @ one.means for one in found])
    squares = torch.stack([one.weights @ (one.means**2 + one.covariances.diagonal(dim1=1, dim2=2)) for one in found])
    return means, squares - means**2


@cache
def example_at(t: float, count: int = 4000) -> Example:
    """Draws of the data with their noise, and what the exact network says of them."""
    x_0 = MIXTURE.sample(count, seed=5)
    noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    forward = ForwardProcess(SCHEDULE)
    x_t = forward.diffuse(x_0, t, noise)
    prediction = Prediction.of(MIXTURE.network(SCHEDULE)(x_t, t), x_t, t, *SCHEDULE.levels(t))
    return Example(prediction, x_0, noise, torch.full((count,), t), forward)


def process(covariance: str) -> ReverseProcess:
    """The exact network with a covariance; numbers and spectra are measured by draws."""
    kind, options = find_covariance(covariance), {}
    if kind.number is not None:
        options[kind.number] = lambda t: torch.as_tensor(float(example_at(float(t)).residual("noise").square().mean()))
    if issubclass(kind, BySpectrum):
        cosines = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)  # of two numbers

        def powers(t: Any) -> Tensor:
            return (kind.normalised(example_at(float(t))).double() @ cosines.T).square().mean(0)

        options["spectrum"] = powers
    return ReverseProcess(MIXTURE.network(SCHEDULE), ForwardProcess(SCHEDULE), covariance, data_range=None, **options)


def wasserstein(first: Tensor, second: Tensor) -> float:
    """The 2-Wasserstein distance of two sets of points (n, d) of equal size, exactly, by the best assignment."""
    cost = torch.cdist(first.double(), second.double()).square().numpy()
    return math.sqrt(float(cost[linear_sum_assignment(cost)].mean()))


def row(name: str, truth: Tensor, y: Tensor) -> dict[str, Any]:
    """All numbers of a covariance."""
    covariance, options = ROWS[name]
    prior = process(covariance)
    shared: dict[str, Any] = {"steps": STEPS, "batch_size": 2**16, "progress": False, **options}
    samples = restore(prior, y, OPERATOR, NOISE_STD, samples=SAMPLES, **shared).samples
    found: dict[str, Any] = {"row": name, "points": len(y), "samples": SAMPLES, "steps": shared["steps"]}
    for level in (0.5, 0.9):
        inside = coverage(samples, truth, level).mean(1)
        found[f"coverage {level}"] = [float(inside.mean()), float(inside.std() / len(y) ** 0.5)]
    means, variances = moments(y)
    own = samples.var(1)
    excess = (samples.mean(1) - means).square() - own / SAMPLES
    found["bias"] = float(excess.mean() / variances.mean())
    found["spread"] = float(own.mean() / variances.mean())
    found["distances"] = []
    for value in MEASURED:
        at = torch.tensor([value], dtype=torch.float64)
        drawn = restore(prior, at, OPERATOR, NOISE_STD, samples=DRAWN, **shared).samples
        found["distances"].append(wasserstein(drawn, posterior(at).sample(DRAWN, seed=1)))
    return {key: _rounded(value) for key, value in found.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """Print a line of JSON per covariance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--record", type=Path, help="a file for the lines")
    options = parser.parse_args()
    truth = MIXTURE.sample(options.points, seed=3)
    noise = torch.randn(options.points, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    y = truth @ A.T + NOISE_STD * noise
    exact = [[posterior(torch.tensor([v])).sample(DRAWN, seed=seed) for seed in (1, 2)] for v in MEASURED]
    lines = [{"row": "exact samples", "distances": _rounded([wasserstein(*pair) for pair in exact])}]
    for name in ROWS:
        lines.append(row(name, truth, y))
        print(json.dumps(lines[-1]), flush=True)
    if options.record:
        options.record.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
