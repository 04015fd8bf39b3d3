"""A trajectory: the times 1 <= tau_1 < ... < tau_K that a short reverse process visits (Appendix D).

Even and quadratic trajectories use exact arithmetic. Optimal ones come from dynamic programming over a table of costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

import numpy as np
import torch

from optcov.schedule import Schedule, check_number, check_schedule, is_whole

MOST_TIMES = 100_000  # of a trajectory in continuous time
ROUNDING = 1e-9  # relative, of a noise-to-signal ratio that is found by logarithms


@final
@dataclass(frozen=True)
class Trajectory:
    """Times in ascending order, without 0.

    >>> Trajectory.even(Schedule.linear(), 5).times
    (1, 251, 500, 750, 1000)
    >>> list(Trajectory((1, 500, 1000)).descending())
    [(1000, 500), (500, 1), (1, 0)]
    """

    times: tuple[float, ...]

    def __init__(self, times: Sequence[float]):
        if isinstance(times, str) or not isinstance(times, Iterable) or getattr(times, "ndim", 1) != 1:
            raise ValueError(f"times = {times!r:.80} is not a sequence of times; pass one such as [1, 500, 1000]")
        values = tuple(_number(t) for t in times)
        if not values:
            raise ValueError("a trajectory needs at least one time, got none")
        for before, after in zip((0, *values), values, strict=False):
            if not after > before:
                raise ValueError(
                    f"times must increase strictly and start above 0, but {after} follows {before}; sort them and "
                    f"remove repeated ones"
                )
        object.__setattr__(self, "times", values)

    def __len__(self) -> int:
        return len(self.times)

    def descending(self) -> Iterator[tuple[float, float]]:
        """The steps (t, s), from the last time down to 0."""
        yield from zip(reversed(self.times), (*reversed(self.times[:-1]), 0), strict=True)

    def cost(self, costs: np.ndarray[Any, Any]) -> float:
        """Sum of costs[s, t] over the steps. The times must be whole, because they index the table."""
        if any(not is_whole(t) for t in self.times):
            raise ValueError(f"times such as {self.times[0]} are no places in a table; use the positions on its grid")
        return float(sum(costs[int(s), int(t)] for t, s in self.descending()))

    def diffusers_timesteps(self, schedule: Schedule) -> list[int]:
        """The times as diffusers' schedulers take them: descending and counted from 0.

        Each must be a time of the full process.
        """
        steps = [schedule.number(t) for t in self.times]
        off = [t for t, n in zip(self.times, steps, strict=True) if abs(n - round(n)) > 1e-6]
        if off:
            raise ValueError(
                f"time {off[0]} is not one of {schedule.grid_size} even times, so diffusers has no such timestep"
            )
        return [round(n) - 1 for n in reversed(steps)]

    @staticmethod
    def even(schedule: Schedule, K: int) -> Trajectory:
        """K times from 1 to N: round(1 + i (N - 1) / (K - 1)), half to even.

        For real times N = 1000, and each result is multiplied by final_time / N.
        """
        N, K = _check_length(schedule, K)
        return Trajectory(schedule.grid(round(1 + Fraction(i * (N - 1), K - 1)) for i in range(K)))

    @staticmethod
    def quadratic(schedule: Schedule, K: int) -> Trajectory:
        """K times from 1 to N, denser near 0: round(1 + (N - 1) (i / (K - 1))^2).

        Repeated times are moved up by one. Real times are scaled as in `even`.
        """
        N, K = _check_length(schedule, K)
        times = _distinct([round(1 + (N - 1) * Fraction(i, K - 1) ** 2) for i in range(K)], N)
        return Trajectory(schedule.grid(times))

    @staticmethod
    def karras(
        schedule: Schedule,
        K: int,
        rho: float = 7.0,
        first_sigma: float | None = None,
        last_sigma: float | None = None,
    ) -> Trajectory:
        """K times whose noise-to-signal ratio sigma is even in sigma^(1 / rho).

        These are the times of EDM (Karras et al. 2022, Eq. 5), which uses rho = 7.
        first_sigma, last_sigma: sigma at the first and at the last time; by default those of the schedule.

        Discrete times are rounded, and repeated ones are moved up by one. If no signal is left at the last time, sigma
        is infinite there. Then the last time is kept, and the formula uses sigma of the time before it.
        """
        check_schedule(schedule)
        most = schedule.grid_size if schedule.discrete else MOST_TIMES
        if not is_whole(K) or not 2 <= K <= most:
            raise ValueError(
                f"K = {K!r} is not a whole number of times from 2 to {most}; choose another number of steps"
            )
        rho = check_number("rho", rho)
        if not 0.1 <= rho < math.inf:  # below, powers of sigma leave the range of float64
            raise ValueError(f"rho = {rho} is not a number of at least 0.1; EDM's is 7")
        first, last = schedule.first_time, schedule.final_time
        end = schedule.last_time_with_signal
        if last_sigma is not None:
            end = last = _time_of_sigma(schedule, "last_sigma", last_sigma, first, end)
        if first_sigma is not None:
            first = _time_of_sigma(schedule, "first_sigma", first_sigma, first, end)
        if not first < end:
            raise ValueError(f"first_sigma = {first_sigma} is not below the last one, {sigma_of(schedule, end):.3g}")
        low, high = (sigma_of(schedule, t) ** (1 / rho) for t in (first, end))
        sigmas = np.linspace(low, high, int(K)) ** rho
        times = schedule.time_at(torch.as_tensor(-2 * np.log(sigmas))).tolist()
        times[0], times[-1] = first, last
        return Trajectory(_distinct([round(t) for t in times], schedule.grid_size) if schedule.discrete else times)

    @staticmethod
    def optimal(costs: np.ndarray[Any, Any], K: int) -> Trajectory:
        """The K times with the least total cost.

        costs[s, t], (N + 1, N + 1), is used where s < t. An infinite cost forbids a step.
        """
        found = Trajectory.optimal_all(costs, K)
        if K not in found:
            raise ValueError(
                f"no trajectory of {K} times has a finite cost; allow more steps by finite costs, or choose one of "
                f"the lengths {min(found)}..{max(found)}"
            )
        return found[K]

    @staticmethod
    def optimal_all(costs: np.ndarray[Any, Any], K_max: int) -> dict[int, Trajectory]:
        """The best trajectory of every length 1..K_max, from one dynamic program of K_max rows.

        Among equally good trajectories it takes the longest step, from the end backwards. A length is left out if all
        its trajectories contain a forbidden step (of infinite cost).
        """
        costs, K_max = _check_costs(costs, K_max), int(K_max)
        best_previous, totals = _best_previous_times(costs, K_max)
        possible = [K for K in range(1, K_max + 1) if np.isfinite(totals[K - 1])]
        if not possible:
            raise ValueError(
                f"no trajectory of up to {K_max} times reaches the end at a finite cost; infinite costs forbid them all"
            )
        return {K: Trajectory(_walk_back(best_previous, K)) for K in possible}


KINDS = {"even": Trajectory.even, "quadratic": Trajectory.quadratic, "karras": Trajectory.karras}  # by name


def _best_previous_times(costs: np.ndarray[Any, Any], K_max: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Row k - 1, entry t: the time before t on the cheapest path of k steps from 0 to t; and the cost of k steps to N.

    Rows are computed for all ends at once, in blocks that fit into the cache: O(K_max N^2) additions, O(N^2) memory.
    """
    N = len(costs) - 1
    by_end = np.where(np.tri(N + 1, k=-1, dtype=bool), costs.T, np.inf)  # row t: costs of all s < t, contiguous
    total = by_end[:, 0].copy()  # of one step from 0
    previous = np.zeros((K_max, N + 1), dtype=np.int16 if N < 2**15 else np.int32)
    to_end = np.full(K_max, np.inf)
    to_end[0] = total[N]
    block = max(1, 2**16 // (N + 1))
    scratch = np.empty((block, N + 1))
    rows = np.arange(block)
    for k in range(1, K_max):
        shorter, total = total, np.full(N + 1, np.inf)
        for start in range(k + 1, N + 1, block):  # k + 1 steps reach at least time k + 1
            stop = min(start + block, N + 1)
            s = slice(k, stop - 1)  # the time before: at least k, at most the last end - 1
            sums = np.add(by_end[start:stop, s], shorter[s], out=scratch[: stop - start, : stop - 1 - k])
            choice = sums.argmin(1)
            previous[k, start:stop] = choice + k
            total[start:stop] = sums[rows[: stop - start], choice]
        to_end[k] = total[N]
    return previous, to_end


def _walk_back(best_previous: np.ndarray[Any, Any], K: int) -> list[int]:
    times = [best_previous.shape[1] - 1]
    for k in range(K - 1, 0, -1):
        times.append(int(best_previous[k, times[-1]]))
    return times[::-1]


def _check_costs(costs: np.ndarray[Any, Any], K: int) -> np.ndarray[Any, Any]:
    try:
        costs = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"costs must be an (N + 1, N + 1) array of numbers, got {costs!r:.80}") from error
    if costs.ndim != 2 or costs.shape[0] != costs.shape[1] or len(costs) < 2:
        raise ValueError(f"costs must be an (N + 1, N + 1) array, got shape {costs.shape}")
    if not is_whole(K) or not 1 <= K < len(costs):
        raise ValueError(
            f"K = {K!r} is outside 1..{len(costs) - 1}; a trajectory cannot visit more times than there are"
        )
    bad = np.argwhere(np.triu(~(costs > -np.inf), 1))
    if len(bad):
        s, t = bad[0]
        raise ValueError(
            f"costs[{s}, {t}] is {costs[s, t]}; every step s < t needs a cost (use plus infinity to forbid one)"
        )
    return costs


def _check_length(schedule: Schedule, K: int) -> tuple[int, int]:
    N = check_schedule(schedule).grid_size
    if not is_whole(K) or not 2 <= K <= N:
        raise ValueError(f"K = {K!r} is outside 2..{N}; a trajectory runs from 1 to {N} and cannot repeat a time")
    return N, int(K)


def _distinct(times: list[int], N: int) -> list[int]:
    """Ascending times in 1..N, moved up by one where they repeat, and down where they would pass N."""
    for i in range(1, len(times)):
        times[i] = max(times[i], times[i - 1] + 1)
    last = N + 1
    for i in range(len(times) - 1, -1, -1):
        last = times[i] = min(times[i], last - 1)
    return times


def sigma_of(schedule: Schedule, t: float) -> float:
    """The noise-to-signal ratio at a time."""
    return math.exp(-float(schedule.log_snr(t)) / 2)


def _time_of_sigma(schedule: Schedule, name: str, sigma: float, first: float, end: float) -> float:
    """The time of a noise-to-signal ratio between those of two times; the nearest one of a discrete schedule."""
    sigma, low, high = check_number(name, sigma), sigma_of(schedule, first), sigma_of(schedule, end)
    if not low * (1 - ROUNDING) <= sigma <= high * (1 + ROUNDING):
        raise ValueError(f"{name} = {sigma} is outside {low:.3g}..{high:.3g}, what the schedule has")
    time = float(schedule.time_at(torch.tensor([-2 * math.log(sigma)], dtype=torch.float64)))
    return max(round(time), int(first)) if schedule.discrete else min(max(time, first), end)


def _number(t: Any) -> float:
    try:
        value = float(t)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"time {t!r:.80} is not a number; pass numbers") from error
    if not np.isfinite(value):
        raise ValueError(f"time {value} is not finite")
    return int(value) if value.is_integer() and not isinstance(t, float) else value
