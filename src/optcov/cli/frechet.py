"""`optcov frechet`: the distance between two sets of images."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.console import announce, check_seed, finish, print_json, print_table, suggest
from optcov.progress import track

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from optcov.metrics import Distance


def command(
    first: str = typer.Argument(
        help="Images (directory, .npz, .npy, hf:NAME), statistics (.npz), or BUNDLE:METHOD, each class in turn."
    ),
    second: str = typer.Argument(help="The same kinds. To choose a split of a data set, add #train or #test."),
    features: str = typer.Option(
        "fashion", help="Feature extractor: fashion, lite0, inception, inception:pytorch-fid or inception:FILE."
    ),
    samples: int = typer.Option(2000, min=4, help="Images to draw from a BUNDLE:METHOD."),
    steps: int = typer.Option(10, min=2, help="Reverse steps of a BUNDLE:METHOD."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of a BUNDLE:METHOD."),
    kernel: bool = typer.Option(
        False, "--kernel", help="Measure the kernel distance, too. With inception it is always measured (KID)."
    ),
    save_first: Path = typer.Option(None, help="Write the first set's statistics (mu, sigma) to this .npz file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Measure the Frechet distance of two sets of images, with its standard error and its limit of many samples."""
    from optcov import storage
    from optcov.methods import find_method
    from optcov.metrics import FeatureStatistics, MetricError, find_extractor, measure_frechet, measure_kernel
    from optcov.metrics.extractors import FID
    from optcov.metrics.kernel import rows_of
    from optcov.metrics.sources import Drawing, open_source, split_method
    from optcov.metrics.statistics import check_same_dimension

    extractor = find_extractor(features)

    def watch(batches: Iterable[Tensor]) -> Iterator[Tensor]:
        return track(batches, samples, "drawing", "images", len)

    opened = [  # each with noise of its own: error and limit take the two sides as independent
        open_source(source, extractor, Drawing(samples, steps, seed, first=side * samples), watch)
        for side, source in enumerate((first, second))
    ]
    check_same_dimension(*(source.dimension for source in opened))
    if kernel and not all(source.rows for source in opened):
        raise MetricError(
            "a kernel distance needs images on both sides, or statistics by optcov statistics, which keep some "
            "features; leave --kernel out"
        )
    if save_first is not None:
        storage.require_writable(save_first)
    drawn = {source: method for source in (first, second) if (method := split_method(source)[1])}
    efforts = [name if find_method(method).adaptive else f"{name} in {steps} steps" for name, method in drawn.items()]
    effort = f", {samples} images of {' and of '.join(efforts)}" if drawn else ""
    announce(f"measures {extractor.distance} between {first} and {second}{effort}")
    one, other = (source.features() for source in opened)
    distance = measure_frechet(one, other)
    result = {"distance": extractor.distance, "first": first, "second": second, **_shown(distance)}
    rows, others = rows_of(one), rows_of(other)
    if rows is not None and others is not None and (kernel or extractor.distance.startswith(FID)):
        result["kernel"] = _shown(measure_kernel(rows, others))
    if save_first is not None:
        statistics = one if isinstance(one, FeatureStatistics) else FeatureStatistics.of(one)
        replace(statistics, features=extractor.identity).save(save_first)
    if as_json:
        print_json(result)
        return
    _print(extractor.distance, result)
    more = ["optcov", "table", "fid", "--bundle", split_method(next(iter(drawn)))[0] if drawn else "fashion"]
    if save_first is None:
        suggest(*more)
    else:
        finish(save_first, *more)


def _shown(distance: Distance) -> dict[str, object]:
    return {name: value for name, value in asdict(distance).items() if name != "replicates"}


def _print(name: str, result: dict[str, object]) -> None:
    rows = [
        (name, result["value"]),
        ("standard error", result["standard_error"]),
        ("limit of many samples", result["limit"]),
    ]
    kernel = result.get("kernel")
    if isinstance(kernel, dict):
        kind = "KID" if name.startswith("FID") else "kernel distance"
        rows += [(kind, kernel["value"]), (f"standard error of {kind}", kernel["standard_error"])]
    counts = result["counts"]
    assert isinstance(counts, tuple)
    title = f"{result['first']} ({counts[0] or '?'}) against {result['second']} ({counts[1] or '?'})"
    print_table(title, ("quantity", "value"), [(what, "-" if v is None else f"{v:.6g}") for what, v in rows])
