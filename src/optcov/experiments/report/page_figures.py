"""Figures of a report as PNG bytes: numbers against K, variances against time and against errors, chosen times."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from optcov.canvas import colours_of, new_axes, new_figure, open_frame, png
from optcov.experiments.tables import Section, TableResult

OUTLIER = 5.0  # times the median: what is larger leaves a plot, so that the rest can be told apart

_LENGTH = re.compile(r"K = (\d{1,9})")


@final
@dataclass(frozen=True)
class VarianceAndError:
    """Means over images and pixels at one time."""

    predicted: float  # variance of x_0 given x_t
    measured: float  # squared error of the mean of x_0 given x_t
    ratio_error: float | None  # standard error of predicted / measured; None of one image, or where nothing was missed

    @staticmethod
    def of(predicted: Tensor, measured: Tensor) -> VarianceAndError:
        """From means over pixels of each image, (B,)."""
        p, m = predicted.double(), measured.double()
        if len(p) < 2 or not m.any():
            return VarianceAndError(float(p.mean()), float(m.mean()), None)
        error = (p - p.mean() / m.mean() * m).std() / len(p) ** 0.5 / m.mean()  # of a ratio of means, to first order
        return VarianceAndError(float(p.mean()), float(m.mean()), float(error))


def lengths_of(section: Section) -> list[int]:
    """K of each column; empty if the columns are something else."""
    found = [_LENGTH.fullmatch(column) for column in section.columns]
    return [int(match[1]) for match in found if match] if all(found) else []


def against_steps(section: Section, quantity: str) -> bytes:
    """Numbers of each row against K with their errors; dashed along even trajectories where there are optimal ones."""
    figure, axes = new_axes("steps K", quantity)
    lengths = lengths_of(section)
    colours = colours_of(_base(row.name) for row in section.rows)
    for row in section.rows:
        known = [(K, e.value, e.error or 0.0) for K, e in zip(lengths, row.entries, strict=True) if e.value is not None]
        if known:
            style = "--" if row.name.startswith("ET ") else "-"
            colour = colours[_base(row.name)]
            alike = [name for name in colours if colours[name] == colour]
            marker = "os^vDPX*"[alike.index(_base(row.name)) % 8]
            K, values, errors = zip(*known, strict=True)
            axes.errorbar(K, values, errors, fmt=marker + style, color=colour, markersize=4, label=row.name)
    axes.set_xscale("log")
    numbers = [e.value for row in section.rows for e in row.entries if e.value is not None]
    if numbers and min(numbers) > 0:
        axes.set_yscale("log")
        axes.set_ylim(top=min(1.2 * max(numbers), OUTLIER * statistics.median(numbers)))
        _plain_ticks(axes)
    axes.set_xticks(lengths, [str(K) for K in lengths])
    axes.set_xticks([], minor=True)
    axes.set_title(section.heading)
    figure.legend(fontsize=8, loc="outside right upper")
    return png(figure)


def variance_curves(times: Sequence[float], variances: Mapping[str, Sequence[float]]) -> bytes:
    """Mean variance of a step against its time, and where it lies between beta-tilde (0) and beta (1)."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    low, high = variances["beta_tilde"], variances["beta"]
    colours = colours_of(variances)
    for name, values in variances.items():
        style = ":" if name in ("beta_tilde", "beta") else "-"
        left.plot(times, values, style, color=colours[name], label=name)
        share = [(v - a) / (b - a) if b > a else 0.0 for v, a, b in zip(values, low, high, strict=True)]
        right.plot(times, share, style, color=colours[name], label=name)
    left.set(xlabel="time t", ylabel="variance of the step from t", yscale="log")
    right.set(xlabel="time t", ylabel="share of the way from beta-tilde to beta")
    open_frame(left, right)
    left.legend(frameon=False)
    return png(figure)


def variance_against_error(times: Sequence[float], found: Mapping[str, Sequence[VarianceAndError]]) -> bytes:
    """Predicted variance and measured squared error of x_0 against time, and their ratio with two standard errors."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    colours = colours_of(found)
    for name, points in found.items():
        colour = colours[name]
        left.plot(times, [p.predicted for p in points], "-", color=colour, label=f"{name}, predicted")
        known = [(t, p) for t, p in zip(times, points, strict=True) if p.measured]
        ratios, errors = [p.predicted / p.measured for _, p in known], [2 * (p.ratio_error or 0.0) for _, p in known]
        right.errorbar([t for t, _ in known], ratios, errors, fmt="o-", color=colour, label=name)
    left.plot(times, [p.measured for p in next(iter(found.values()))], "ko", markersize=5, label="measured")
    right.axhline(1.0, color="gray", linestyle=":")
    left.set(xlabel="time t", ylabel="variance of x_0, squared error of its mean", yscale="log")
    right.set(xlabel="time t", ylabel="predicted / measured (± 2 standard errors)", yscale="log")
    _plain_ticks(right)
    open_frame(left, right)
    for axes in (left, right):
        axes.legend(frameon=False)
    return png(figure)


def chosen_times(result: TableResult) -> list[tuple[str, dict[int, Sequence[float]]]]:
    """The times of each row along optimal trajectories in a table of likelihoods, by K."""
    found = []
    for section in result.sections:
        for row in section.rows:
            if row.name.startswith("OT "):
                by_length = zip(lengths_of(section), row.entries, strict=True)
                times = {K: entry.details["times"] for K, entry in by_length if entry.details.get("times")}
                if times:
                    found.append((f"{row.name} ({section.heading})", times))
    return found


def _base(name: str) -> str:
    return name.removeprefix("ET ").removeprefix("OT ")


def _plain_ticks(axes: Any) -> None:
    """Label a logarithmic axis of less than two decades by plain numbers, also between the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
