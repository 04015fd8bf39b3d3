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
    # check all names before drawing
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


@final
@dataclass(frozen=True)
class Errors:
    """Root mean squared errors of denoised images over some noises, (n, C, H, W), float32."""

    images: Tensor  # the images themselves, uint8, (n, C, H, W)
    expected: Mapping[str, Tensor]  # by the covariance of each method
    true: Tensor


@torch.no_grad()
def errors_of(
    bundle: Bundle,
    methods: Sequence[str],
    x_0: Tensor,
    t: float,
    condition: Mapping[str, Tensor] | None = None,
    noises: int = 32,
) -> Errors:
    """Denoise images x_0 (n, C, H, W) from time t: the error that each method expects, and the one there is."""
    processes = {name: bundle.reverse_process(name) for name in methods}
    first = processes[methods[0]]
    expected = {name: torch.zeros_like(x_0) for name in methods}
    true = torch.zeros_like(x_0)
    for seed in range(noises):
        noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(seed))
        prediction = first.predict(first.forward.diffuse(x_0, t, noise), t, **(condition or {}))
        for name, process in processes.items():
            posterior = process.posterior_from(prediction)
            expected[name] += posterior.variance.expand_as(x_0).float() / noises
        true += (posterior.mean.float() - x_0).square() / noises
    return Errors(to_8bit(x_0), {name: square.sqrt() for name, square in expected.items()}, true.sqrt())


def draw_comparison(cells: Sequence[Drawn], path: Path, caption: str, errors: Errors | None = None) -> None:
    """Write a picture with methods as rows and numbers of steps as columns.

    errors: a column more, from top to bottom: the images, the errors that methods expect, and the true ones.
    """
    methods, steps = list(dict.fromkeys(c.method for c in cells)), list(dict.fromkeys(c.steps for c in cells))
    side = max(1, round(len(cells[0].images) ** 0.5))
    beside = [] if errors is None else _beside(errors)
    rows, columns = max(len(methods), len(beside)), len(steps) + bool(beside)
    figure = new_figure(1.1 + 1.5 * columns, 0.6 + 1.55 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    for cell in cells:
        axes = panels[methods.index(cell.method)][steps.index(cell.steps)]
        show(axes, grid(cell.images, side, border=1))
        if cell.evaluations != cell.steps:
            axes.set_xlabel(f"{cell.evaluations:.0f} evaluations", fontsize=7)
    for row, method in zip(panels, methods, strict=False):
        row[0].set_ylabel(method, fontsize=9)
    for axes, K in zip(panels[0], steps, strict=False):
        axes.set_title(f"{K} steps", fontsize=9)
    for row, (title, images) in zip(panels, beside, strict=False):
        show(row[-1], grid(images, side, border=1))
        row[-1].set_title(title, fontsize=9)
    if caption:
        figure.suptitle(caption, fontsize=10, parse_math=False)
    save(figure, path)


def _beside(errors: Errors) -> list[tuple[str, Tensor]]:
    """Titles and pictures, all errors on one scale."""
    most = float(errors.true.quantile(0.99))
    shown = {f"error, {name}": found for name, found in errors.expected.items()} | {"error, true": errors.true}
    return [("test images", errors.images), *((title, heat(found.mean(1) / most)) for title, found in shown.items())]


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


def heat(levels: Tensor) -> Tensor:
    """Levels from 0 to 1, (n, H, W), as colours from black to yellow, uint8 (n, 3, H, W)."""
    from matplotlib import colormaps

    return torch.from_numpy(colormaps["magma"](levels.clamp(0, 1).numpy(), bytes=True)[..., :3]).permute(0, 3, 1, 2)


def show(axes: Any, image: Tensor) -> None:
    """Show an 8-bit image (C, H, W) without ticks."""
    axes.axis("on")
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
