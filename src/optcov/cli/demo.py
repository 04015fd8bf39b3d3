"""`optcov demo`: what the optimal covariance does, as a picture and a table, in less than a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.console import announce, finish, print_json, print_table
from optcov.progress import track

if TYPE_CHECKING:
    from optcov.bundle import Bundle

MODEL = "fashion"
METHODS_SHOWN = ["DDPM, beta-tilde", "DDPM, beta", "DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM"]
STEPS_SHOWN = [5, 10, 25]
SCORED = {
    "beta_tilde": "DDPM, beta-tilde",
    "beta": "DDPM, beta",
    "analytic": "A-DDPM",
    "sn": "SN-DDPM",
    "npr": "NPR-DDPM",
}
STEPS_SCORED = [10, 25]


def command(
    out: Path = typer.Option(Path("out/demo.png"), help="Where to write the picture."),
    images: int = typer.Option(64, min=2, help="Test images scored for the table of bits/dim."),
    mixture: bool = typer.Option(False, "--mixture", help="Points in the plane instead, where the network is perfect."),
    steps: int = typer.Option(10, min=2, help="Number of reverse steps of --mixture."),
    points: int = typer.Option(2000, min=2, help="Number of points of --mixture."),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Compare the methods on an embedded model, from the same noise: a picture and a table of bits/dim."""
    if mixture:
        _mixture(out, steps, points, json)
        return
    from optcov import bundle
    from optcov.bundle.pictures import compare, draw_comparison
    from optcov.methods import DEFAULT_METHOD

    loaded = bundle.load(MODEL)
    announce(f"{MODEL}: {len(METHODS_SHOWN)} methods from the same noise, then bits/dim of {images} test images")
    cells = compare(loaded, METHODS_SHOWN, STEPS_SHOWN, count=4)
    tracked = track(cells, len(METHODS_SHOWN) * len(STEPS_SHOWN), "sampling", "cells")
    draw_comparison(list(tracked), out, f"{loaded.name}: the same noise by every method")
    rows = _scores(loaded, images)
    if json:
        print_json(
            {
                "picture": str(out),
                "bits_per_dim": [{"method": m, **dict(zip(STEPS_SCORED, s, strict=True))} for m, *s in rows],
            }
        )
        return
    header = ("method", *(f"{K} steps" for K in STEPS_SCORED))
    print_table(f"bits/dim on {images} test images (lower is better)", header, rows)
    finish(out, "optcov", "sample", MODEL, "--method", DEFAULT_METHOD, "--steps", "10")


def _scores(model: Bundle, count: int) -> list[tuple[str, ...]]:
    """-ELBO in bits/dim with its standard error, one row per method."""
    from optcov.bundle import test_images
    from optcov.likelihood import Sweep
    from optcov.trajectory import Trajectory

    trajectories = [Trajectory.even(model.schedule, K) for K in STEPS_SCORED]
    times = sorted({t for trajectory in trajectories for t in trajectory.times})
    process = model.reverse_process("NPR-DDPM")
    sweep = Sweep(
        process,
        test_images(model.name)[:count],
        list(SCORED),
        times=times,
        mean_square_noise=model.per_time("mean_square_noise"),
        batch_size=32,
    )
    for _ in track(sweep, len(sweep), "scoring", "batches"):
        pass
    return [
        (name, *(str(sweep.table.score(covariance, trajectory)) for trajectory in trajectories))
        for covariance, name in SCORED.items()
    ]


def _mixture(out: Path, steps: int, points: int, json: bool) -> None:
    from optcov.experiments.report.mixture import draw_mixture, run_mixture
    from optcov.methods import METHODS

    announce(f"a mixture of Gaussians: {points} points by {len(METHODS)} methods in {steps} steps, as one picture")
    results = list(track(run_mixture(steps, points), len(METHODS) + 1, f"{steps} steps by every method", "methods"))
    draw_mixture(results, steps, out)
    rows = [(r.method, f"{r.evaluations:.0f}", f"{r.distance:.4f}") for r in results]
    if json:
        keys = ("method", "evaluations", "distance")
        print_json({"picture": str(out), "rows": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    print_table(f"A mixture of Gaussians in {steps} steps", ("method", "evaluations", "distance to data"), rows)
    finish(out, "optcov", "demo", "--mixture", "--steps", "50")
