"""What all figures share: a canvas without a window, axes with a grid, PNG on disk or as bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optcov.storage import atomic_writer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(x: str, y: str) -> tuple[Figure, Any]:
    """A figure with one pair of axes, which have these labels."""
    figure = new_figure(9, 5)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def times_figure(shown: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Times of trajectories, row by row from top to bottom."""
    figure = new_figure(8, 0.6 + 0.45 * len(shown))
    axes = figure.add_subplot()
    for height, times in enumerate(shown.values()):
        axes.plot(times, [height] * len(times), "|", markersize=14, color=f"C{height % 10}")
    axes.set_yticks(range(len(shown)), list(shown), fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set(xlabel="time t", title=title)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_writer(path) as stream:
        figure.savefig(stream, format="png", dpi=DOTS_PER_INCH)


def png(figure: Figure) -> bytes:
    """The same as bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DOTS_PER_INCH)
    return stream.getvalue()
