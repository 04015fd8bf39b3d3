"""`optcov demo`: every method from the same noise, as a picture and a table."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.cli.console import finish, print_table


def command(
    out: Path = typer.Option(Path("out/demo.png"), help="Where to write the picture."),
    steps: int = typer.Option(10, help="Number of reverse steps."),
) -> None:
    """Sample a mixture of Gaussians in a few steps by every method; a picture and a table."""
    raise NotImplementedError
