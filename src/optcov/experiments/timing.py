"""Time as ratios: several pieces of work in turns within one run, so that other load on the machine hits all alike."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, final

import torch

Work = Callable[[], object]


@final
@dataclass(frozen=True)
class Timing:
    """Seconds that one piece of work took, round by round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over rounds, in seconds."""
        return statistics.median(self.seconds)


def interleaving(work: Mapping[str, Work], rounds: int, warm_up: int = 1) -> Iterator[dict[str, Timing]]:
    """Run every piece of work once per round, in an order that alternates, and time each: what is known by then."""
    if rounds < 1 or not work:
        raise ValueError(f"rounds = {rounds} and {len(work)} pieces of work: need at least one of each")
    for _ in range(warm_up):
        for function in work.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        names = list(work)[:: 1 if number % 2 else -1]
        for name in names:
            begin = _clock()
            work[name]()
            seconds[name].append(_clock() - begin)
        yield {name: Timing(tuple(values)) for name, values in seconds.items()}


def _clock() -> float:
    """Seconds, once the GPU has done what it was given: it works on while Python goes on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()
    return time.perf_counter()


def ratio(ours: Timing, theirs: Timing) -> tuple[float, float]:
    """Median of the ratios round by round, and its standard error from their scatter.

    Not the ratio of the medians: on a busy machine these may be of different rounds, fast ones and slow ones.
    """
    pairs = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    if len(pairs) < 2:
        raise ValueError("the scatter of one round cannot be told; time two rounds or more")
    error = statistics.stdev(pairs) / len(pairs) ** 0.5
    return statistics.median(pairs), 1.25 * error  # that of a median, if normal


def paired_ratio(ours: Timing, theirs: Timing) -> tuple[float, float, float]:
    """Median of the ratios round by round, and both ends of a 95 % confidence interval for it.

    The interval is between two order statistics: whatever the distribution of the rounds, each is as likely above its
    median as below. Fewer than six rounds cannot give one; then it is the whole line.

    >>> paired_ratio(Timing((1.0, 2.0, 3.0)), Timing((1.0, 1.0, 1.0)))
    (2.0, 0.0, inf)
    """
    pairs = sorted(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))
    rounds, below, outside = len(pairs), 0.0, 0  # P(fewer than `outside` rounds lie below the median)
    while below + math.comb(rounds, outside) / 2**rounds <= 0.025:
        below, outside = below + math.comb(rounds, outside) / 2**rounds, outside + 1
    low, high = (pairs[outside - 1], pairs[-outside]) if outside else (0.0, math.inf)
    return statistics.median(pairs), low, high


def peak_memory() -> float:
    """Largest resident size of this process so far, in MiB.

    On Linux from the process's status: getrusage would give a child the peak of the process that started it.
    """
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="utf-8") as stream:
            return next(int(line.split()[1]) for line in stream if line.startswith("VmHWM:")) / 2**10
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def machine() -> dict[str, Any]:
    """What times and numbers depend on: versions, processor and threads; without the machine's name."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "processor": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def device_name(device: torch.device) -> str:
    """cpu, or what the maker calls the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_PACKAGES = ("optcov", "torch", "diffusers", "numpy")


def _processor() -> str:
    """The processor's model where the system tells it (Linux), else its family."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            models = [line.partition(":")[2].strip() for line in stream if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
