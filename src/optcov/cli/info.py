"""`optcov info`: what a bundle holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer

from optcov.cli.console import print_json, print_table


def command(
    bundle: str = typer.Argument("fashion", help="Name of an embedded model, or a bundle's directory."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Show a bundle: network, schedule, heads, how it was trained, calibration, sizes."""
    from optcov.bundle.description import describe

    content = describe(bundle)
    if as_json:
        print_json(content)
        return
    for section, entries in content.items():
        if isinstance(entries, Mapping) and entries:
            print_table(section, ("what", "value"), _rows(entries))


def _rows(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """One row per value; nested names are joined by dots, long lists are shortened."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            yield f"{prefix}{name}", text if len(text) <= 80 else f"{text[:77]}..."
