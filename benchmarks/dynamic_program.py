"""The dynamic program for optimal trajectories against computing all N rows, in the same run.

The baseline is plain: every row over all N^2 pairs, its minimum down the columns, extrapolated from a few rows.
By count of additions it costs 12 times ours at N = 1000 and 22 times at N = 4000, so a larger ratio says something of
the baseline, too. Our own program run to all N rows takes 4.3 to 4.8 times as long as to K = 200 at N = 1000, and would
take 3.7 times as many additions as to K = 400 at N = 4000.

    python benchmarks/dynamic_program.py          N = 1000, K <= 200
python benchmarks/dynamic_program.py --large  N = 4000, K <= 400 as well (minutes: the plain rows are slow)
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from optcov import Trajectory


def costs_of(N: int) -> np.ndarray:
    """Costs like those of a bound: dear long steps, with noise."""
    s, t = np.meshgrid(np.arange(N + 1), np.arange(N + 1), indexing="ij")
    noise = np.random.default_rng(0).random((N + 1, N + 1))
    return (t - s) ** 2 / (1 + 0.01 * s * t) + 5 / (s + 1) + 0.1 * noise


def plain_rows(upper: np.ndarray, rows: int) -> np.ndarray:
    """The first rows of the table, each for all pairs (s, t), with no regard to which can occur."""
    total = upper[0].copy()
    for _ in range(rows - 1):
        sums = total[:, None] + upper
        choice = sums.argmin(0)
        total = sums[choice, np.arange(len(total))]
    return total


def measure(N: int, K: int, sampled_rows: int, repeats: int) -> None:
    """Time both, interleaved; of the plain rows only some, since each costs the same."""
    costs = costs_of(N)
    upper = np.where(np.triu(np.ones(costs.shape, dtype=bool), 1), costs, np.inf)  # not timed: it is done once
    ours, plain = [], []
    for _ in range(repeats):
        start = time.process_time()
        found = Trajectory.optimal_all(costs, K)
        ours.append(time.process_time() - start)
        start = time.process_time()
        plain_rows(upper, sampled_rows)
        plain.append((time.process_time() - start) / (sampled_rows - 1) * N)
    check = plain_rows(upper, min(K, sampled_rows))
    assert np.isclose(found[min(K, sampled_rows)].cost(costs), check[N], rtol=1e-12)
    ratio = min(plain) / min(ours)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"N = {N}, all K <= {K}: {min(ours):.2f} s of one core, {ratio:.1f} times faster than all rows; "
        f"peak {peak:.2f} GB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    measure(1000, 200, sampled_rows=40, repeats=3)
    if arguments.large:
        measure(4000, 400, sampled_rows=5, repeats=1)
