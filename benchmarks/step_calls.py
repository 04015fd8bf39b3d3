"""Counts what one reverse step costs a reader: calls, functions, files and changes of file inside the package.

A step with a plain function as network, and one with the embedded network and a head. Run:

    python benchmarks/step_calls.py
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import optcov
from optcov import NoisePrediction

PACKAGE = str(Path(optcov.__file__).parent)


@dataclass(frozen=True)
class Walk:
    """The calls of Python functions of the package, in their order."""

    calls: list[tuple[str, str]]  # (file, function)

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def changes(self) -> int:
        names = [file for file, _ in self.calls]
        return sum(a != b for a, b in itertools.pairwise(names))

    def __str__(self) -> str:
        return (
            f"{len(self.calls)} calls of {self.functions} functions in {len(self.files)} files, {self.changes} changes"
        )


def trace(work: Callable[[], Any]) -> Walk:
    """Follow the work."""
    calls: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls.append((file[len(PACKAGE) + 1 :].replace(os.sep, "/"), frame.f_code.co_qualname))

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return Walk(calls)


def plain_step(covariance: str = "npr") -> Walk:
    """A step whose network is a plain function; times were seen before, as in every batch but the first."""
    x_t = torch.zeros(4, 1, 8, 8)

    def network(x_t: torch.Tensor, t: float) -> NoisePrediction:
        return NoisePrediction(0.9 * x_t, {"npr": torch.full_like(x_t, 0.1), "sn": torch.ones_like(x_t)})

    process = optcov.ReverseProcess(network, optcov.ForwardProcess(optcov.Schedule.linear()), covariance)
    process.step(x_t, 500, 400)
    return trace(lambda: process.step(x_t, 500, 400))


def embedded_step(name: str | Path = "fashion") -> Walk:
    """A step of an embedded network, or that of a bundle, with its NPR head alone, as sampling runs it."""
    bundle = optcov.load(name).with_schedule("linear")
    process = bundle.reverse_process("NPR-DDPM", all_heads=False)
    x_t = torch.zeros(2, *bundle.image_shape)
    with torch.no_grad():
        process.step(x_t, 500, 400)
        return trace(lambda: process.step(x_t, 500, 400))


if __name__ == "__main__":
    for name, walk in (("plain function", plain_step()), ("embedded network", embedded_step())):
        print(f"{name}: {walk}")
        for file, function in walk.calls if "-v" in sys.argv else ():
            print(f"    {file:32} {function}")
