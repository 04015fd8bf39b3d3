"""`optcov frechet`: the distance between two sets of images."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from optcov.cli.console import finish, print_json, print_table


def command(
    first: str = typer.Argument(help="Images (directory, .npz, .npy, hf:NAME), statistics (.npz), or BUNDLE:METHOD."),
    second: str = typer.Argument(help="The same; a data set with splits takes #train or #test at its end."),
    features: str = typer.Option("fashion", help="Feature extractor: fashion, lite0 or inception:FILE."),
    samples: int = typer.Option(2000, min=4, help="Images to draw from a BUNDLE:METHOD."),
    steps: int = typer.Option(10, min=2, help="Reverse steps to draw them by."),
    seed: int = typer.Option(0, help="Seed to draw them by."),
    kernel: bool = typer.Option(False, "--kernel", help="Measure the kernel distance (KID) too."),
    save_first: Path = typer.Option(None, help="Write the first set's statistics (mu, sigma) to this .npz file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Measure the Frechet distance of two sets of images, with its standard error and its limit of many samples."""
    from torch import Tensor

    from optcov.metrics import (
        FeatureStatistics,
        MetricError,
        features_of,
        find_extractor,
        kernel_distance,
        measure_frechet,
    )
    from optcov.metrics.sources import Drawing

    extractor = find_extractor(features)
    drawing = Drawing(samples, steps, seed)
    one, other = (features_of(source, extractor, drawing) for source in (first, second))
    distance = measure_frechet(one, other)
    measured = {name: value for name, value in asdict(distance).items() if name != "replicates"}
    result = {"distance": extractor.distance, "first": first, "second": second, **measured}
    if kernel:
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            raise MetricError("a kernel distance needs images on both sides, not statistics")
        result["kernel"] = asdict(kernel_distance(one, other))
    if as_json:
        print_json(result)
    else:
        _print(extractor.distance, result)
    if save_first is not None:
        (one if isinstance(one, FeatureStatistics) else FeatureStatistics.of(one)).save(save_first)
        if not as_json:
            finish(save_first)


def _print(name: str, result: dict[str, object]) -> None:
    rows = [
        (name, result["value"]),
        ("standard error", result["standard_error"]),
        ("limit of many samples", result["limit"]),
    ]
    kernel = result.get("kernel")
    if isinstance(kernel, dict):
        rows += [("kernel distance", kernel["value"]), ("spread over subsets", kernel["spread"])]
    counts = result["counts"]
    assert isinstance(counts, tuple)
    title = f"{result['first']} ({counts[0] or '?'}) against {result['second']} ({counts[1] or '?'})"
    print_table(title, ("quantity", "value"), [(what, "-" if v is None else f"{v:.6g}") for what, v in rows])
