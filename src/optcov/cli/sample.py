"""`optcov sample`: images by any method, resumable; pictures that compare methods or show uncertainty."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from optcov.cli.console import errors, finish, print_json, track

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optcov.bundle import Bundle
    from optcov.methods import Method
    from optcov.reverse import ReverseProcess
    from optcov.trajectory import Trajectory

COMPARED = "DDPM, beta;DDIM;A-DDIM;NPR-DDIM;SN-DDIM"


def command(
    bundle: str = typer.Argument("fashion", help="A bundle: an embedded model's name, or a directory."),
    out: Path = typer.Option(Path("out/samples"), help="Directory for the images, or the picture with --compare."),
    method: str = typer.Option(
        "SN-DDIM", help="A row of the paper, such as SN-DDIM or Euler-Maruyama, or a peer: UniPC, ..."
    ),
    steps: int = typer.Option(25, help="Number of reverse steps K."),
    n: int = typer.Option(64, "--n", help="Number of images."),
    seed: int = typer.Option(0, help="With the image's number it determines its noise."),
    trajectory: str = typer.Option("even", help="Times: even, quadratic or optimal."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    batch_size: int = typer.Option(64, help="Images drawn at once; does not change them."),
    file_format: str = typer.Option("png", "--format", help="png: a file per image; npz: a file per batch."),
    noise_cap: float | None = typer.Option(
        None, help="The paper's y in 8-bit levels; by default the bundle's; 0: none."
    ),
    last_step: str = typer.Option("mean", help="The last step shows its mean, or is drawn: mean or draw."),
    tolerance: float = typer.Option(0.05, help="Relative tolerance of Gotta Go Fast, which chooses its own steps."),
    compare: bool = typer.Option(
        False, "--compare", help="One picture: methods as rows, steps as columns, same noise."
    ),
    methods: str = typer.Option(COMPARED, help="Methods of --compare, separated by semicolons."),
    steps_list: str = typer.Option("5,10,25,50", "--compare-steps", help="Numbers of steps of --compare."),
    variance_map: bool = typer.Option(False, "--variance-map", help="Show the standard deviation beside each image."),
    json: bool = typer.Option(False, "--json", help="Print what was done as JSON."),
) -> None:
    """Draw images by any method of the paper."""
    from optcov import bundle as bundles

    model = bundles.load(bundle)
    if schedule is not None:
        model = model.with_schedule(schedule)
    if compare:
        picture = out if out.suffix == ".png" else out / "compare.png"
        _compare(model, picture, methods.split(";"), _numbers(steps_list), min(n, 16), seed)
        if json:
            print_json({"picture": str(picture), "methods": methods.split(";"), "steps": _numbers(steps_list)})
        else:
            finish(picture, f"optcov bpd {bundle}")
        return
    request = Request(model, method, steps, trajectory, seed, noise_cap, last_step, tolerance)
    _sample(request, out, n, batch_size, file_format, json)
    if not json:
        finish(out / "grid.png", f"optcov sample {bundle} --compare --out out/compare.png")
    if variance_map:
        _variance_map(request, out / "variance.png", min(n, 16))


class Request:
    """What to draw, put together from the options."""

    def __init__(
        self,
        model: Bundle,
        method: str,
        steps: int,
        trajectory: str,
        seed: int,
        noise_cap: float | None,
        last_step: str,
        tolerance: float,
    ):
        from optcov.methods import find_method
        from optcov.report.comparison import on_schedule_of

        self.method: Method = find_method(method)
        model = on_schedule_of(model, self.method)
        self.model, self.seed, self.last_step, self.tolerance = model, seed, last_step, tolerance
        self.process: ReverseProcess | None = None
        self.trajectory: Trajectory | None = None
        if self.method.covariance is not None:
            self.process = model.reverse_process(self.method)
            self.trajectory = model.trajectory(steps, trajectory, self.method.name)
        self.steps = steps
        self.noise_cap = model.noise_cap(self.method.name) if noise_cap is None else noise_cap or None

    def settings(self) -> dict[str, Any]:
        """What determines the images, for run.json."""
        return {
            "bundle": self.model.name,
            "backbone": self.model.backbone,
            "schedule": repr(self.model.schedule),
            "method": self.method.name,
            "steps": self.steps,
            "times": list(self.trajectory.times) if self.trajectory else None,
            "seed": self.seed,
            "noise_cap": self.noise_cap,
            "last_step": self.last_step,
            "tolerance": self.tolerance if self.method.solver == "gotta_go_fast" else None,
        }

    def draw(self, indices: list[int], **options: Any) -> Any:
        """Draw the images with these numbers."""
        from optcov.methods import draw

        return draw(
            self.method,
            self.model.network,
            self.model.schedule,
            self.steps,
            self.model.image_shape,
            indices,
            self.seed,
            process=self.process,
            trajectory=self.trajectory,
            data_range=self.model.data_range,
            noise_cap=self.noise_cap,
            last_step=self.last_step,
            relative_tolerance=self.tolerance,
            **options,
        )


def _sample(request: Request, out: Path, n: int, batch_size: int, file_format: str, json: bool) -> None:
    from optcov.data import grid, to_8bit, write_png
    from optcov.data.sample_directory import SampleDirectory
    from optcov.storage import directory_lock

    if n < 1 or batch_size < 1:
        raise ValueError(f"--n {n} and --batch-size {batch_size} must be positive")
    with directory_lock(out):
        directory = SampleDirectory(out, request.settings(), file_format)
        missing = directory.missing(n)

        def batches() -> Iterator[list[int]]:
            for first in range(0, len(missing), batch_size):
                indices = missing[first : first + batch_size]
                directory.save(to_8bit(request.draw(indices).x_0), indices)
                yield indices

        for _ in track(batches(), len(missing), f"{request.method.name}, {request.steps} steps", "images", len):
            pass
        shown = min(n, 64)
        write_png(out / "grid.png", grid(directory.first(shown), columns=8))
    clamps = request.process.clamps if request.process else None
    if json:
        done = {"directory": str(out), "images": n, "drawn": len(missing), "settings": request.settings()}
        print_json(
            {**done, "clamped": {"below": clamps.below, "above": clamps.above, "of": clamps.total} if clamps else None}
        )
        return
    if clamps is not None and clamps.below:
        share = clamps.below / clamps.total
        errors.print(f"{share:.2%} of the estimated variances were negative and taken as 0", highlight=False)
    errors.print(f"{len(missing)} images drawn, {n - len(missing)} were there already", highlight=False)


def _compare(model: Bundle, path: Path, methods: list[str], steps: list[int], count: int, seed: int) -> None:
    from optcov.report.comparison import compare, draw_comparison

    cells = compare(model, methods, steps, count, seed)
    tracked = track(cells, len(methods) * len(steps), "methods and steps", "cells")
    draw_comparison(list(tracked), path, f"{model.name}: the same noise by every method")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 5,10,25") from error


def _variance_map(request: Request, path: Path, count: int) -> None:
    from optcov.data import to_8bit
    from optcov.report.comparison import clean_deviation, draw_deviations
    from optcov.sampling import Step

    if request.trajectory is None:
        raise ValueError(f"{request.method.name} estimates no variance; choose a method such as SN-DDIM or NPR-DDPM")
    middle = request.trajectory.times[len(request.trajectory) // 2]
    seen: list[Any] = []

    def remember(step: Step) -> None:
        if step.t == middle:
            seen.append(step.x_t)

    images = to_8bit(request.draw(list(range(count)), callback=remember).x_0)
    deviations = clean_deviation(request.model, request.method.name, seen[0], middle)
    draw_deviations(
        images, deviations, path, f"{request.method.name}: standard deviation of x_0 given x_t at t = {middle}"
    )
    finish(path)
