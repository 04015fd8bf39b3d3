"""`optcov demo`: every method from the same noise, as a picture and a table."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.cli.console import finish, print_json, print_table, track


def command(
    out: Path = typer.Option(Path("out/demo.png"), help="Where to write the picture."),
    steps: int = typer.Option(10, help="Number of reverse steps."),
    points: int = typer.Option(2000, help="Number of points."),
    json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
) -> None:
    """Sample a mixture of Gaussians in a few steps by every method: a picture and a table."""
    from optcov.methods import METHODS
    from optcov.report.mixture import draw_mixture, run_mixture

    results = list(track(run_mixture(steps, points), len(METHODS) + 1, f"{steps} steps by every method", "methods"))
    draw_mixture(results, steps, out)
    rows = [(r.method, f"{r.evaluations:.0f}", f"{r.distance:.4f}") for r in results]
    if json:
        print_json(
            {
                "picture": str(out),
                "rows": [dict(zip(("method", "evaluations", "distance"), r, strict=True)) for r in rows],
            }
        )
        return
    print_table(f"A mixture of Gaussians in {steps} steps", ("method", "evaluations", "distance to data"), rows)
    finish(out, "optcov demo --steps 50")
