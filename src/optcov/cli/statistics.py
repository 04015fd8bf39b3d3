"""`optcov statistics`: gather the statistics of a set of images once, for distances to it."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import announce, finish, print_json, resumable
from optcov.progress import fresh, track


def command(
    data: str = typer.Argument(help="Images: directory, .npz, .npy, hf:NAME. To choose a split, add #train or #test."),
    out: Path = typer.Argument(help="The .npz file to write: mu, sigma, and some features for the kernel distance."),
    features: str = typer.Option(
        "inception", help="Feature extractor: inception, inception:pytorch-fid, inception:FILE, lite0 or fashion."
    ),
    rows: int = typer.Option(10000, min=2, help="Random images whose features are kept for the kernel distance."),
    packed: bool = typer.Option(
        False, "--packed", help="Store sigma in half the space. Only optcov can read the file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Compute reference statistics for FID and other distances. An interrupted command resumes."""
    from optcov.metrics import MetricError, find_extractor
    from optcov.metrics.gathering import check_place, gather_statistics
    from optcov.metrics.sources import load_images

    if out.suffix != ".npz":
        raise MetricError(f"{out} must end in .npz, by which optcov frechet knows statistics; name it {out}.npz")
    extractor = find_extractor(features)
    images = load_images(data, extractor)
    there = check_place(images, extractor, out, rows)
    if there:
        announce(f"{out} is there already, with the statistics of these {len(images):,} images")
    else:
        announce(f"gathers the features of {extractor.distance} of {len(images):,} images of {data} for {out}")
    with resumable(out.parent):
        steps = gather_statistics(images, extractor, out, rows=rows, packed=packed)
        for step in track(steps, len(images), "gathering", "images", fresh(lambda step: step.done)):
            if step.done % 1000 == 0:
                announce(f"{step.done:,} of {step.total:,} images")
    if as_json:
        print_json({"file": str(out), "distance": extractor.distance, "images": len(images), "there_before": there})
        return
    finish(out, "optcov", "frechet", "SAMPLES", str(out), "--features", features)
