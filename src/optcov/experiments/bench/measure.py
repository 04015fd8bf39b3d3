"""What is measured: each benchmark is one or more pieces of our work against something plain, in turns.

name               our work                                        against
heads              a step with SN and NPR heads                    the bare forward pass
heads_deep         a step with a head that has hidden layers       the bare forward pass
heads_residual     a step with a residual head                     the bare forward pass
sn_step            a step by an SN head                            a step by an NPR head
correlated         a step that correlates pixels and colours       a step that does not
sampler            optcov.sample with an NPR head                  diffusers' DDPMPipeline, same network
sampler_plain      optcov.sample without a head                    the same
sampler_loaded     the same                                        the same, laid out as diffusers loads it
sampler_ddim       the same by DDIM's forward process              diffusers' DDIMPipeline, same network
stage2             an AdamW step for SN and NPR                    the bare forward pass
closed_form        a pass of Fisher scoring for SN and NPR         the bare forward pass
sweep              a sweep's work outside the network, at t = N    a loop over all s
sweep_share        the same for one batch                          the bare forward pass
dynamic_program    optimal trajectories of all K <= 100            all N rows of the table
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from optcov.experiments.bench import work
from optcov.experiments.bench.work import FEWEST, BenchSize, Contest
from optcov.experiments.timing import Timing, interleaving, paired_ratio

BENCHMARKS: dict[str, Callable[[BenchSize], Contest]] = {
    "heads": work.heads,
    "heads_deep": work.heads_deep,
    "heads_residual": work.heads_residual,
    "sn_step": work.sn_step,
    "correlated": work.correlated,
    "sampler": work.sampler,
    "sampler_plain": work.sampler_plain,
    "sampler_loaded": work.sampler_loaded,
    "sampler_ddim": work.sampler_ddim,
    "stage2": work.stage2,
    "closed_form": work.closed_form,
    "sweep": work.sweep,
    "sweep_share": work.sweep_share,
    "dynamic_program": work.dynamic_program,
}


@final
@dataclass(frozen=True)
class BenchResult:
    """One ratio."""

    name: str
    ours: str
    theirs: str
    ratio: float  # median over rounds
    low: float | None  # a 95 % interval for it, by the sign test; none of fewer than six rounds
    high: float | None
    bound: float | None  # what it should not exceed
    ours_seconds: float  # median
    theirs_seconds: float
    rounds: int
    peak_megabytes: float | None  # largest resident size of a process that does our work alone

    def words(self) -> str:
        """The ratio with its interval."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.ratio:.3f}{interval}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def run_benchmarks(names: Sequence[str], size: BenchSize, memory: bool = True) -> Iterator[BenchResult]:
    """Measure some benchmarks one after the other; memory: also in a process of its own for each."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise ValueError(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    return _results(names, size, memory)


def _results(names: Sequence[str], size: BenchSize, memory: bool) -> Iterator[BenchResult]:
    for name in names:
        contest = BENCHMARKS[name](size)
        found = _timed(contest, size)
        middle, low, high = (share * contest.scale for share in paired_ratio(found["ours"], found["theirs"]))
        known = math.isfinite(high)
        yield BenchResult(
            name,
            contest.ours_name,
            contest.theirs_name,
            middle,
            low if known else None,
            high if known else None,
            contest.bound,
            found["ours"].median,
            found["theirs"].median / contest.scale,
            len(found["ours"].seconds),
            peak_of(name, size) if memory else None,
        )


def _timed(contest: Contest, size: BenchSize) -> dict[str, Timing]:
    """As many rounds as were asked for, or as fit into the time."""
    begin = time.perf_counter()
    found: dict[str, Timing] = {}
    for found in interleaving({"ours": contest.ours, "theirs": contest.theirs}, size.rounds):
        if len(found["ours"].seconds) >= FEWEST and time.perf_counter() - begin > size.seconds:
            break
    return found


def peak_of(name: str, size: BenchSize) -> float:
    """Peak memory in MB of a process that runs our side once: a peak of this process would be that of all before."""
    program = (
        "from optcov.experiments.bench import BENCHMARKS, BenchSize\n"
        "from optcov.experiments.timing import peak_memory\n"
        f"BENCHMARKS[{name!r}]({replace(size, seconds=0.0)!r}).ours()\n"
        "print(peak_memory())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {name} failed: {done.stderr[-500:]}")
    return round(float(done.stdout.split()[-1]), 1)
