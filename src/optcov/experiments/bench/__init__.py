"""The project's speed as ratios within one run, so that they mean the same on any machine and under any load."""

from optcov.experiments.bench.measure import BENCHMARKS, run_benchmarks
from optcov.experiments.bench.work import BenchSize

__all__ = ["BENCHMARKS", "BenchSize", "run_benchmarks"]
