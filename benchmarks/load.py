"""Load: memory stays flat over many images, and time and memory grow linearly in images, steps and pixels.

    python benchmarks/load.py [--images 50000] [--formats npz,png] [--quick]

Draws 8x8 images by a network of a few operations, so that what is measured is the library; writes them as shards and as
files, reads the directory again, and scores them. Slopes are those of log cost over log size: 1 is linear.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, generate
from optcov.data import to_8bit
from optcov.data.sample_directory import SampleDirectory
from optcov.likelihood import Sweep
from optcov.metrics import FeatureStatistics

SHAPE = (1, 8, 8)
BATCH = 256
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def network(x_t: Tensor, t: float) -> NoisePrediction:
    """A network that costs next to nothing."""
    return NoisePrediction(torch.tanh(x_t), {"npr": 0.1 + 0.1 * torch.sigmoid(x_t)})


def process() -> ReverseProcess:
    """NPR-DDPM with that network."""
    return ReverseProcess(network, ForwardProcess(Schedule.linear(100)), "npr")


@dataclass(frozen=True)
class Load:
    """What a run of many images took."""

    images: int
    seconds_to_draw: float
    seconds_to_score: float
    seconds_to_look_again: float  # which images are missing in the full directory
    memory_early: float  # MB of resident memory when a tenth was drawn
    memory_late: float  # MB when everything was drawn and scored
    memory_looked: float  # MB with the list of all that is there
    files: int


def resident() -> float:
    """Resident memory of this process in MB, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def sample_and_score(images: int, directory: Path, file_format: str = "npz", steps: int = 5) -> Load:
    """Draw, write, take feature statistics of and score so many images; nothing is kept but sums."""
    run, trajectory = process(), Trajectory.even(Schedule.linear(100), steps)
    writer = SampleDirectory(directory, {"what": "load"}, file_format)
    statistics: FeatureStatistics | None = None
    early, began = 0.0, time.monotonic()
    for batch in generate(run, trajectory, SHAPE, images, BATCH):
        writer.save(to_8bit(batch.images), batch.indices)
        part = FeatureStatistics.of(batch.images.flatten(1))
        statistics = part if statistics is None else statistics.merge(part)
        if not early and batch.indices[-1] >= images // 10:
            early = resident()
    drawn = time.monotonic()
    sweep = Sweep(run, Images(images), ["npr", "beta"], times=[50, 100], batch_size=BATCH)
    for _ in sweep:
        pass
    scored, late = time.monotonic(), resident()
    missing = SampleDirectory(directory, {"what": "load"}, file_format).missing(images)
    looked = time.monotonic()
    assert not missing
    assert statistics is not None
    assert statistics.count == images
    files = sum(1 for path in directory.rglob("*") if path.is_file())
    return Load(images, drawn - began, scored - drawn, looked - scored, early, late, resident(), files)


class Images:
    """So many images, made as they are asked for."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def x_0(self, index: Tensor) -> Tensor:
        """Images of the given numbers, in [-1, 1]."""
        levels = (index[:, None] * 31 + torch.arange(64) * 7) % 256
        return (levels / 127.5 - 1).reshape(-1, *SHAPE)


def slope(sizes: Sequence[int], cost: Callable[[int], float], rounds: int = 3) -> float:
    """Least-squares slope of log cost over log size; of each size the fastest of some rounds counts, taken in turns."""
    best = dict.fromkeys(sizes, math.inf)
    for _ in range(rounds):
        for size in sizes:
            best[size] = min(best[size], cost(size))
    x = torch.tensor([math.log(size) for size in sizes])
    y = torch.tensor([math.log(best[size]) for size in sizes])
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def draw(images: int = 64, steps: int = 10, side: int = 32, batch: int = 64) -> None:
    """Draw so many images of so many pixels in so many steps, and keep none."""
    for _ in generate(process(), Trajectory.even(Schedule.linear(100), steps), (1, side, side), images, batch):
        pass


def seconds(**size: int) -> float:
    """Time to draw."""
    began = time.monotonic()
    draw(**size)
    return time.monotonic() - began


def megabytes(**size: int) -> float:
    """Peak memory of drawing above that of an idle process, in a process of its own: a heap that was once full hides
    what the next one needs. Blocks go back to the system when they are freed, so that what counts is what is used and
    not what the allocator keeps in pieces."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        if sys.platform == "linux":
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
        idle = resident()
        draw(**size)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        os.write(writing, str(peak - idle).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        used = float(answer.read())
    os.waitpid(child, 0)
    return used


def slopes_of_time(rounds: int = 3) -> dict[str, float]:
    """Slopes of time in images, steps and pixels."""
    return {
        "images": slope([128, 512, 2048], lambda n: seconds(images=n, side=16), rounds),
        "steps": slope([10, 30, 90], lambda n: seconds(steps=n), rounds),
        "pixels": slope([64**2, 128**2, 256**2], lambda n: seconds(images=16, side=math.isqrt(n)), rounds),
    }


def slopes_of_memory() -> dict[str, float]:
    """Slopes of memory in images at once and in pixels; images one batch after another, and steps, should cost none."""
    draw(images=1)  # what the first use of everything costs once is no part of it
    return {
        "images": slope([128, 512, 2048], lambda n: megabytes(images=n, side=128), 1),
        "images at once": slope([16, 64, 256], lambda n: megabytes(images=n, batch=n, side=256), 1),
        "steps": slope([10, 30, 90], lambda n: megabytes(steps=n, side=128), 1),
        "pixels": slope([128**2, 256**2, 512**2], lambda n: megabytes(images=32, side=math.isqrt(n)), 1),
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--quick", action="store_true", help="2,000 images and one round")
    parser.add_argument("--formats", default="npz,png", help="how images are kept, separated by commas")
    chosen = parser.parse_args()
    images = 2_000 if chosen.quick else chosen.images
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    for file_format in chosen.formats.split(","):
        with tempfile.TemporaryDirectory() as directory:
            results[file_format] = asdict(sample_and_score(images, Path(directory), file_format))
        print(json.dumps({file_format: results[file_format]}), file=sys.stderr, flush=True)
    results["slopes of time"] = slopes_of_time(1 if chosen.quick else 3)
    results["slopes of memory"] = slopes_of_memory()
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
