"""A restoration as one picture: measurement, mean, standard deviation, samples, and the truth if it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from optcov.canvas import new_figure, save
from optcov.inverse.operators import Mask
from optcov.inverse.restoration import Restoration
from optcov.schedule import check_whole

HIDDEN = (0.35, 0.45, 0.75)  # the colour of pixels that a mask hides


def draw_restoration(found: Restoration, path: Path, truth: Tensor | None = None, shown: int = 4) -> None:
    """Write the picture; one row per measurement."""
    shape = found.operator.shape
    if not _is_image(shape):
        raise ValueError(f"only images (1, H, W) or (3, H, W) can be drawn, not data of shape {shape}")
    samples = found.samples if found.batched else found.samples.unsqueeze(0)
    measurements = found.measurement if found.batched else found.measurement.unsqueeze(0)
    truths = None if truth is None else truth.reshape(-1, *shape)
    shown = min(check_whole("shown", shown, 0), samples.shape[1])
    # a measurement that is no image, such as some numbers, has no panel
    titles = ["measurement"] if _is_image(found.operator.measurement_shape) else []
    first = len(titles)
    titles += ["mean", "deviation", *[f"sample {j + 1}" for j in range(shown)]]
    titles += [] if truths is None else ["truth"]
    rows = len(samples)
    figure = new_figure(1.25 * len(titles) + 0.85, 1.25 * rows + 0.55)
    places = figure.add_gridspec(rows, len(titles) + 1, width_ratios=(*[1.0] * len(titles), 0.08))
    panels = np.array([[figure.add_subplot(places[row, j]) for j in range(len(titles))] for row in range(rows)])
    means = found.mean if found.batched else found.mean.unsqueeze(0)
    deviations = found.std if found.batched else found.std.unsqueeze(0)
    low, high = found.data_range or (float(samples.min()), float(samples.max()))
    drawn: Any = None
    for number, line in enumerate(panels):
        if first:
            _show(line[0], measurements[number], low, high, found.operator)
        _show(line[first], means[number], low, high)
        drawn = line[first + 1].imshow(
            deviations[number].mean(0).numpy(), cmap="magma", vmin=0, vmax=float(deviations.max())
        )
        for axes, sample in zip(line[first + 2 :], samples[number, :shown], strict=False):
            _show(axes, sample, low, high)
        if truths is not None:
            _show(line[-1], truths[number], low, high)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize=11)
    figure.colorbar(drawn, cax=figure.add_subplot(places[:, -1]), label="deviation")
    caption = f"{found.method}, {found.operator.name}, noise {found.noise_std:g}, {found.evaluations} evaluations"
    figure.suptitle(caption, fontsize=11, parse_math=False)
    save(figure, path)


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def _show(axes: Any, image: Tensor, low: float, high: float, operator: object = None) -> None:
    pixels = ((image.float() - low) / (high - low)).clamp(0, 1)
    pixels = pixels.expand(3, *pixels.shape[1:]).permute(1, 2, 0).clone()
    if isinstance(operator, Mask):
        hidden = operator.mask.expand(3, *operator.mask.shape[1:]).permute(1, 2, 0) == 0
        pixels[hidden] = image.new_tensor(HIDDEN).float().expand_as(pixels)[hidden]
    axes.imshow(pixels.numpy(), interpolation="nearest")
