"""Pictures of samples: grids, methods against numbers of steps from the same noise, deviations beside images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.bundle import Bundle, Sampler
from optcov.canvas import new_figure, save
from optcov.data import grid, to_8bit
from optcov.reverse import ReverseProcess
from optcov.solvers import SolverResult


@final
@dataclass(frozen=True)
class Drawn:
    """What one method drew in some number of steps."""

    method: str
    steps: int
    images: Tensor  # uint8, (n, C, H, W), on the CPU
    evaluations: float  # of the network, mean over the images


def compare(
    bundle: Bundle, methods: Sequence[str], steps: Sequence[int], count: int, seed: int = 0, **options: Any
) -> Iterator[Drawn]:
    """Draw the same `count` images (the same noise) by every method in every number of steps.

    options: those of `Sampler`, such as condition and guidance.
    """
    # all of them before the first draws, so that a bad name does not cost the time of the good ones
    return _cells({(name, K): Sampler(bundle, name, K, seed, **options) for name in methods for K in steps}, count)


def _cells(samplers: Mapping[tuple[str, int], Sampler], count: int) -> Iterator[Drawn]:
    drawn: dict[str, SolverResult] = {}  # by Gotta Go Fast, which chooses its own steps, the same for every K
    for (name, K), sampler in samplers.items():
        result = drawn.get(name) or sampler.draw(range(count))
        if sampler.adaptive:
            drawn[name] = result
        images = to_8bit(sampler.bundle.as_images(result.x_0)).cpu()
        yield Drawn(sampler.method.name, K, images, float(result.evaluations.double().mean()))


def draw_grid(images: Tensor, path: Path, caption: str, columns: int = 8) -> None:
    """Write images (n, C, H, W), uint8, row by row above a caption."""
    columns = min(columns, len(images))
    picture = grid(images, columns)
    width = 6.0
    figure = new_figure(width, width * picture.shape[1] / picture.shape[2] + (0.4 if caption else 0))
    show(figure.subplots(), picture)
    if caption:
        figure.supxlabel(caption, fontsize=9, parse_math=False)  # names of bundles may hold dollars
    save(figure, path)


def draw_comparison(cells: Sequence[Drawn], path: Path, caption: str) -> None:
    """Write a picture with methods as rows and numbers of steps as columns."""
    methods, steps = (list(dict.fromkeys(values)) for values in ([c.method for c in cells], [c.steps for c in cells]))
    side = max(1, round(len(cells[0].images) ** 0.5))
    figure = new_figure(1.1 + 1.5 * len(steps), 0.6 + 1.55 * len(methods))
    panels = figure.subplots(len(methods), len(steps), squeeze=False)
    for cell in cells:
        axes = panels[methods.index(cell.method)][steps.index(cell.steps)]
        show(axes, grid(cell.images, side, border=1))
        if cell.evaluations != cell.steps:
            axes.set_xlabel(f"{cell.evaluations:.0f} evaluations", fontsize=7)
    for row, method in zip(panels, methods, strict=True):
        row[0].set_ylabel(method, fontsize=9)
    for axes, K in zip(panels[0], steps, strict=True):
        axes.set_title(f"{K} steps", fontsize=9)
    if caption:
        figure.suptitle(caption, fontsize=10, parse_math=False)
    save(figure, path)


def draw_deviations(images: Tensor, deviations: Tensor, path: Path, caption: str) -> None:
    """Write images (n, C, H, W), uint8, each with its standard deviation (n, C, H, W) to its right."""
    count = len(images)
    columns = min(4, count)
    rows = -(-count // columns)
    figure = new_figure(3.1 * columns + 0.8, 1.75 * rows + 0.5)
    panels = figure.subplots(rows, 2 * columns, squeeze=False)
    drawn: Any = None
    for axes in panels.flat:
        axes.axis("off")
    for number in range(count):
        left, right = panels[number // columns][2 * (number % columns) : 2 * (number % columns) + 2]
        show(left, images[number])
        drawn = right.imshow(deviations[number].mean(0).numpy(), cmap="magma", vmin=0, vmax=float(deviations.max()))
    figure.colorbar(drawn, ax=panels, label="standard deviation of x_0", shrink=0.8)
    if caption:
        figure.suptitle(caption, fontsize=10, parse_math=False)
    save(figure, path)


def show(axes: Any, image: Tensor) -> None:
    """Show an 8-bit image (C, H, W) without ticks."""
    pixels = image.permute(1, 2, 0).numpy()
    axes.imshow(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def clean_deviation(process: ReverseProcess, x_t: Tensor, t: float, **condition: Tensor) -> Tensor:
    """Standard deviation of x_0 given x_t by the process's covariance, (n, C, H, W)."""
    with torch.no_grad():
        posterior = process.posterior(x_t, t, **condition)
    return posterior.variance.expand_as(posterior.mean).sqrt().float().cpu()
