"""`optcov info`: what a bundle holds."""

from __future__ import annotations

import typer

from optcov.console import output, print_json, suggest

LABEL = 13  # width of the column of names


def command(
    bundle: str = typer.Argument("fashion", help="Name of an embedded model, or a bundle's directory."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Show a bundle: network, schedule, heads, how it was trained, calibration, sizes."""
    from rich.table import Table
    from rich.text import Text

    from optcov.bundle.description import describe, lines
    from optcov.text_table import printable

    content = describe(bundle)
    if as_json:
        print_json(content)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=LABEL)
    table.add_column(overflow="fold")
    for label, text in lines(content):
        table.add_row(Text(printable(label), style="bold"), Text(printable(text)))
    output.print(table)
    suggest("optcov", "sample", bundle, "--compare")
