"""A table as plain text and as HTML, for results that print and show themselves."""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[Sequence[object]]


def text_table(title: str, header: Sequence[str], rows: Rows) -> str:
    """Aligned columns: the first is text, the others are numbers."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])


def html_table(title: str, header: Sequence[str], rows: Rows) -> str:
    """The same for a notebook."""

    def row(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><caption>{html.escape(title)}</caption>{row(header, 'th')}{body}</table>"
