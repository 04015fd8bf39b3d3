"""`optcov demo`: what the optimal covariance does, as a picture and a table, in about a minute."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import announce, check_out, finish, print_json, print_table, was_given
from optcov.progress import track

MODEL = "fashion"
METHODS_SHOWN = ["DDPM, beta", "A-DDPM", "NPR-DDPM", "Bridge 2M"]
METHODS_JUDGED = ["A-DDPM", "NPR-DDPM"]  # the errors that they expect stand beside their samples
METHODS_SCORED = ["DDPM, beta-tilde", "DDPM, beta", "A-DDPM", "SN-DDPM", "NPR-DDPM", "CNPR-DDPM"]
STEPS_SHOWN = [5, 10, 25]
CLASSES_SHOWN = [0, 5, 7, 8]  # a T-shirt, a sandal, a sneaker, a bag
NOISY = 0.25  # the time that test images are denoised from: about as much noise as signal
STEPS_SCORED = [10, 25]
LOOK = (
    "look at the right column: NPR knows where the network errs, A expects the same error everywhere. In five steps "
    "(left) beta leaves noise, and Bridge 2M draws the sharpest images."
)


def command(
    context: typer.Context,
    out: Path = typer.Option(Path("out/demo.png"), help="Where to write the picture."),
    images: int = typer.Option(64, min=2, help="Test images scored for the table of bits/dim."),
    mixture: bool = typer.Option(False, "--mixture", help="Use points in the plane, with a perfect network."),
    steps: int = typer.Option(10, min=2, help="Number of reverse steps of --mixture."),
    points: int = typer.Option(2000, min=2, help="Number of points of --mixture."),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Compare the methods on an embedded model, from the same noise: a picture and a table of bits/dim."""
    from optcov.storage import require_writable

    check_out(out)
    if mixture:
        if was_given(context, "--images"):
            raise ValueError("--images is not of --mixture; leave one of them out")
        require_writable(out)
        _mixture(out, steps, points, json)
        return
    import torch

    from optcov import bundle
    from optcov.bundle import test_set
    from optcov.bundle.pictures import compare, draw_comparison, errors_of

    if was_given(context, "--steps") or was_given(context, "--points"):
        raise ValueError("--steps and --points are of --mixture; add it, or leave them out")
    model, tests = bundle.load(MODEL), test_set(MODEL)
    if images > len(tests):
        raise ValueError(f"--images {images} is more than the {len(tests)} test images that come with {MODEL}")
    require_writable(out)
    announce(f"{MODEL}: {len(METHODS_SHOWN)} methods from the same noise, then bits/dim of {images} test images")
    told = {"class_labels": torch.tensor(CLASSES_SHOWN)}
    cells = compare(model, METHODS_SHOWN, STEPS_SHOWN, count=len(CLASSES_SHOWN), condition=told)
    tracked = list(track(cells, len(METHODS_SHOWN) * len(STEPS_SHOWN), "sampling", "cells"))
    labels = [] if tests.labels is None else tests.labels.tolist()
    shown = torch.tensor([labels.index(label) for label in CLASSES_SHOWN])
    errors = errors_of(model, METHODS_JUDGED, tests.x_0(shown), NOISY, told)
    draw_comparison(tracked, out, f"{model.name}: the same noise by every method", errors)
    score = model.bits_per_dim(tests.select(slice(images)), steps=STEPS_SCORED, methods=METHODS_SCORED)
    rows = [(name, *(str(score.of(name, K)) for K in STEPS_SCORED)) for name in METHODS_SCORED]
    if json:
        print_json(
            {
                "picture": str(out),
                "bits_per_dim": [{"method": m, **dict(zip(STEPS_SCORED, s, strict=True))} for m, *s in rows],
            }
        )
        return
    header = ("method", *(f"{K} steps" for K in STEPS_SCORED))
    print_table(f"bits/dim on {images} test images with their labels (lower is better)", header, rows)
    finish(out, "optcov", "sample", MODEL, "--steps", "10")
    announce(LOOK)


def _mixture(out: Path, steps: int, points: int, json: bool) -> None:
    from optcov.experiments.report.mixture import draw_mixture, run_mixture
    from optcov.methods import METHODS

    announce(f"a mixture of Gaussians: {points} points by {len(METHODS)} methods in {steps} steps")
    results = list(track(run_mixture(steps, points), len(METHODS) + 1, f"{steps} steps by every method", "methods"))
    draw_mixture(results, steps, out)
    rows = [(r.method, f"{r.evaluations:.0f}", f"{r.distance:.4f}") for r in results]
    if json:
        keys = ("method", "evaluations", "distance")
        print_json({"picture": str(out), "rows": [dict(zip(keys, row, strict=True)) for row in rows]})
        return
    print_table(f"A mixture of Gaussians in {steps} steps", ("method", "evaluations", "distance to data"), rows)
    finish(out, "optcov", "demo", "--mixture", "--steps", "50")
