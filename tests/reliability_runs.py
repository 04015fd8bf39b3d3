"""Small runs of the five long commands, and what of their results must not depend on how they came about."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optcov import Schedule
from small_bundles import SHAPE, small_bundle

TINY_NETWORK = "--channels 8,8 --groups 4 --head-dim 8"
BY_STEPS = "--kind residual --steps 3 --batch-size 4 --checkpoint-every 1"
TINY_FIT = "--heads sn,npr --times 3 --measure-images 4 --calibration-samples 0"
COMMANDS = {  # in a directory made by `prepare`; everything they write is under out/
    "train": f"train images.npz --out out/run --steps 3 --batch-size 4 {TINY_NETWORK} --checkpoint-every 1 --warmup 2",
    "fit": f"fit small images.npz --out out/run --images 16 --batch-size 8 {TINY_FIT}",
    "heads": f"fit small images.npz --out out/run {BY_STEPS} {TINY_FIT}",
    "sample": "sample small --out out/run --method SN-DDPM --steps 2 --n 4 --batch-size 2",
    "bpd": "bpd small images.npz --out out/run --images 2 --train-images 2 --times 3 --steps 2,3",
    "table": "table bpd --bundle small --data images.npz --out out/run --images 2 --train-images 2 --times 3 --steps 2",
}
# what tells how long things took rather than what came out
SPEED = {"seconds", "seconds_left", "images_per_second"}


@dataclass(frozen=True)
class Inputs:
    """A bundle and images, made once and copied for each run."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Inputs:
        small_bundle(Schedule.linear(24)).save(directory / "small")
        pixels = np.random.default_rng(0).integers(0, 256, (24, *SHAPE), dtype=np.uint8)
        np.savez(directory / "images.npz", images=pixels)
        return cls(directory)

    def prepare(self, directory: Path) -> Path:
        """A working directory with copies of the inputs."""
        directory.mkdir(parents=True)
        shutil.copytree(self.directory / "small", directory / "small")
        shutil.copy(self.directory / "images.npz", directory)
        return directory


def arguments(command: str) -> list[str]:
    return COMMANDS[command].split()


def results(directory: Path) -> dict[str, Any]:
    """What a run wrote, by file: bytes, and JSON without what tells of speed. Locks and claims are no results."""
    found: dict[str, Any] = {}
    for path in sorted((directory / "out").rglob("*")):
        if path.is_file() and path.suffix != ".lock" and path.name != ".lock":
            found[str(path.relative_to(directory))] = _content(path)
    return found


def inputs_unchanged(directory: Path, inputs: Inputs) -> bool:
    originals = [path for path in inputs.directory.rglob("*") if path.is_file()]
    return all((directory / p.relative_to(inputs.directory)).read_bytes() == p.read_bytes() for p in originals)


def _content(path: Path) -> Any:
    if path.suffix == ".json":
        return _without_speed(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [_without_speed(json.loads(line)) for line in path.read_text().splitlines()]
    return path.read_bytes()


def _without_speed(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_speed(value) for key, value in content.items() if key not in SPEED}
    return [_without_speed(value) for value in content] if isinstance(content, list) else content
