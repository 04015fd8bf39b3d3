"""Why guidance by correlated NPR fails on the box of CIFAR-10: the gradient is wrong at high noise.

    python benchmarks/restoration_jacobian.py data/cifar10.npz [--record measurements/causes/restoration-jacobian.jsonl]

Guidance takes its gradient up to a time only, and is proximal above. 0 is proximal everywhere, 1 guidance everywhere.
benchmarks/ocm_trace.py shows the same of the Jacobian's trace: it is negative above t = 0.7.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from restoration import NOISE_STD, mean_over, measured, tasks

from optcov import data
from optcov.bundle import load
from optcov.data import to_8bit
from optcov.inverse import Mask, restore
from optcov.inverse.guides import ByPosterior
from optcov.inverse.scores import coverage, psnr

LIMITS = (0.0, 0.35, 0.55, 0.75, 1.0)
METHODS = ("CNPR-DDPM", "NPR-DDPM")
_step = ByPosterior.step


def limit_gradients(limit: float) -> None:
    """Let every guide be proximal above a time; no option of `restore`, since it serves this experiment alone."""

    def step(self: ByPosterior, x_t: Any, y: Any, t: float, *rest: Any) -> Any:
        self.way = "guidance" if t <= limit else "proximal"
        return _step(self, x_t, y, t, *rest)

    ByPosterior.step = step  # type: ignore[method-assign]


def main() -> None:
    """Print a line of JSON per method and limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="CIFAR-10")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--first", type=int, default=16)
    parser.add_argument("--record", type=Path, help="a file for the lines")
    told = parser.parse_args()
    model = load("cifar10")
    truth = data.load(told.data, "test").x_0()[told.first : told.first + told.images]
    box = tasks(tuple(model.image_shape))["box"]
    assert isinstance(box, Mask)
    y = measured(box, truth, told.first)
    lines = []
    for method in METHODS:
        for limit in LIMITS:
            limit_gradients(limit)
            options: dict[str, Any] = {"steps": 15, "samples": 19, "batch_size": 38, "seed": told.first}
            found = restore(model, y, box, NOISE_STD, method=method, way="guidance", progress=False, **options)
            inside = mean_over(coverage(to_8bit(found.samples), to_8bit(truth), 0.9), 1 - box.mask)
            line = {"model": model.digest()[:12], "method": method, "gradients up to": limit}
            line |= {"psnr": _rounded(psnr(found.mean, truth)), "cover90": _rounded(inside)}
            lines.append(line)
            print(json.dumps(line), flush=True)
    if told.record:
        told.record.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(float(value), 4) for value in values]


if __name__ == "__main__":
    main()
