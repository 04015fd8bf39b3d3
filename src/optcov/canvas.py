"""What all figures share: a canvas without a window, a colour for each method, PNG on disk or as bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optcov.storage import atomic_writer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 120

COLOURS = {  # of covariances, in every figure
    "beta_tilde": "#909090",
    "beta": "#d98c3f",
    "analytic": "#8a63b8",
    "sn": "#3a9d6e",
    "npr": "#1f6fb4",
    "sn_correlated": "#1c5c3f",
    "npr_correlated": "#0d3a63",
    "sn_full": "#8cc9a8",
    "npr_full": "#86b9e3",
    "npr_isotropic": "#4fb3bf",
    "ocm": "#c45a9a",
    "spectral": "#8c6a4a",
    "range": "#b5a62e",
    "DDIM": "#cc4444",
}
OTHER = "#404040"
_OTHERS = (OTHER, "#e377c2", "#17becf", "#7f7f00", "#ff9896", "#9edae5", "#a05d56", "#5254a3")  # where many meet
_METHODS = {  # how names of methods begin -> the covariance; the longer beginning is first
    "DDPM, beta-tilde": "beta_tilde",
    "DDPM, beta": "beta",
    "Ancestral sampling": "beta",
    "Improved DDPM": "range",
    "A-": "analytic",
    "SN-": "sn",
    "NPR-": "npr",
    "CSN-": "sn_correlated",
    "CNPR-": "npr_correlated",
    "OCM-": "ocm",
    "Spectral-": "spectral",
    "DDIM": "DDIM",
}


def colour_of(name: str, other: str = OTHER) -> str:
    """The colour of a method or a covariance. Methods with one covariance share it; what is neither gets the other."""
    family = next((family for start, family in _METHODS.items() if name.startswith(start)), name)
    return COLOURS.get(family, other)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """The same for many names. Those without a colour of their own get different ones, in turn."""
    listed = list(dict.fromkeys(names))
    unknown = [name for name in listed if not colour_of(name, "")]
    turns = {name: _OTHERS[number % len(_OTHERS)] for number, name in enumerate(unknown)}
    return {name: colour_of(name, turns.get(name, OTHER)) for name in listed}


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(x: str, y: str) -> tuple[Figure, Any]:
    """A figure with one pair of axes, which have these labels."""
    figure = new_figure(7.6, 4.4)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    open_frame(axes)
    return figure, axes


def open_frame(*panels: Any) -> None:
    """Leave out the upper and the right side of the frame."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)


def times_figure(shown: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Times of trajectories, row by row from top to bottom."""
    figure = new_figure(8, 0.6 + 0.45 * len(shown))
    axes = figure.add_subplot()
    colours = colours_of(shown)
    for height, (name, times) in enumerate(shown.items()):
        axes.plot(times, [height] * len(times), "|", markersize=14, color=colours[name])
    axes.set_yticks(range(len(shown)), list(shown))
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
