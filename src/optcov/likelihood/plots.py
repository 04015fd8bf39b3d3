"""Plots of likelihoods: bits/dim against the number of steps, terms by time, and the times that were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optcov.canvas import colours_of, new_axes, save, times_figure
from optcov.likelihood.table import KINDS, LikelihoodRow

STYLE = {"ET": "--", "OT": "-"}


def plot_bits(rows: Sequence[LikelihoodRow], path: Path, unit: str = "bits/dim") -> None:
    """Bits/dim against K, one line per covariance, dashed for even and solid for optimal trajectories."""
    figure, axes = new_axes("steps K", f"{unit}, at most (lower is better)")
    colours = colours_of(_by_height(rows))
    for (covariance, kind), line in _lines(rows).items():
        values = [row.bits_per_dim.mean for row in line]
        deviations = [row.bits_per_dim.standard_error or 0.0 for row in line]
        axes.errorbar(
            [row.K for row in line], values, deviations, fmt=f"o{STYLE[kind]}", markersize=3, color=colours[covariance]
        )
    axes.set_xscale("log")
    lengths = sorted({row.K for row in rows})
    axes.set_xticks(lengths, [str(K) for K in lengths])
    axes.minorticks_off()
    best = min(row.bits_per_dim.mean - (row.bits_per_dim.standard_error or 0.0) for row in rows)
    axes.set_ylim(0.95 * best if best > 0 else None, _readable_limit(rows))
    axes.legend(handles=_key(colours), loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    save(figure, path)


def _key(colours: Mapping[str, Any]) -> list[Any]:
    """What colours and styles of lines mean."""
    from matplotlib.lines import Line2D

    covariances = [Line2D([], [], color=colour, label=covariance) for covariance, colour in colours.items()]
    return [*covariances, *(Line2D([], [], color="grey", linestyle=STYLE[kind], label=KINDS[kind]) for kind in STYLE)]


def plot_terms(rows: Sequence[LikelihoodRow], K: int, path: Path) -> None:
    """Nats per image of each transition against the time s that it lands on, for one K."""
    figure, axes = new_axes("time s", "KL of the step that lands on s, nats per image")
    colours = colours_of(row.covariance for row in rows)
    for row in (row for row in rows if row.K == K):
        axes.plot(
            row.times[:-1],
            row.terms[1:-1],
            STYLE[row.kind],
            color=colours[row.covariance],
            label=f"{row.covariance}, {KINDS[row.kind]}",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"K = {K}")
    axes.legend(fontsize=7, ncols=2)
    save(figure, path)


def plot_times(rows: Sequence[LikelihoodRow], K: int, path: Path) -> None:
    """The times of the optimal trajectories of one K, covariance by covariance, with the even one for comparison."""
    chosen = {row.covariance: row.times for row in rows if row.K == K and row.kind == "OT"}
    even = next(row.times for row in rows if row.K == K and row.kind == "ET")
    save(times_figure({**chosen, "even": even}, f"chosen times, K = {K}"), path)


def plot_lengths(times: Mapping[int, Sequence[float]], path: Path, title: str) -> None:
    """The times of one method's optimal trajectories, length by length."""
    save(times_figure({f"K = {K}": chosen for K, chosen in times.items()}, f"{title}: optimal times"), path)


def _lines(rows: Sequence[LikelihoodRow]) -> dict[tuple[str, str], list[LikelihoodRow]]:
    lines: dict[tuple[str, str], list[LikelihoodRow]] = {}
    for row in rows:
        lines.setdefault((row.covariance, row.kind), []).append(row)
    return lines


def _by_height(rows: Sequence[LikelihoodRow]) -> list[str]:
    """Covariances as the lines begin at the left, the highest first."""
    first = {row.covariance: row.bits_per_dim.mean for row in sorted(rows, key=lambda row: (-row.K, row.kind == "ET"))}
    return sorted(first, key=lambda name: -first[name])


def _readable_limit(rows: Sequence[LikelihoodRow]) -> float:
    """Cut off covariances that are out of the picture by far, as beta-tilde is at small K."""
    values = sorted(row.bits_per_dim.mean for row in rows)
    return min(values[-1], 3 * values[len(values) // 2]) * 1.05
