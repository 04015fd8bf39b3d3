"""`optcov bench`: measure the project's speed, as ratios within one run."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import announce, finish, print_json, print_table
from optcov.progress import track


def command(
    names: list[str] = typer.Argument(None, help="Benchmarks to run. By default all."),
    rounds: int = typer.Option(
        15, min=2, help="Number of rounds. The result is the median of their ratios, with its interval."
    ),
    batch_size: int = typer.Option(32, min=2, help="Images at once."),
    memory: bool = typer.Option(True, help="Also measure the peak memory of each, in a process of its own."),
    out: Path = typer.Option(Path("out/bench.json"), help="JSON file."),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Measure the speed of heads, sampling, training, sweeps and the dynamic program."""
    from optcov import storage
    from optcov.experiments.bench import BENCHMARKS, BenchSize, run_benchmarks
    from optcov.experiments.timing import machine

    chosen = names or list(BENCHMARKS)
    size = BenchSize(rounds=rounds, batch=batch_size)
    work = run_benchmarks(chosen, size, memory)
    storage.require_writable(out)
    announce(f"measures {', '.join(chosen)}: {rounds} rounds in turns with batches of {batch_size}, and writes {out}")
    results, content = [], {"results": [], "rounds": rounds, "batch": batch_size, **machine()}
    for result in track(work, len(chosen), "benchmarks", "benchmarks"):
        results.append(result)
        content["results"] = [found.to_json() for found in results]
        storage.write_json(out, content)  # each time: a later one may fail
    if json:
        print_json(content)
        return
    print_table(
        f"medians of the ratios of {rounds} rounds in turns, with 95 % intervals, batch {batch_size}",
        ("ours / against", "ratio", "ours, ms", "against, ms", "peak, MB"),
        [
            (
                f"{result.name}: {result.ours} / {result.theirs}",
                result.words(),
                f"{1000 * result.ours_seconds:.1f}",
                f"{1000 * result.theirs_seconds:.1f}",
                "-" if result.peak_megabytes is None else f"{result.peak_megabytes:.0f}",
            )
            for result in results
        ],
    )
    finish(out, "optcov", "table", "cost")
