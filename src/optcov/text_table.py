"""Text for display: tables as plain text and as HTML, and whatever a name may hold made harmless."""

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


def counted(there: int, asked: int, what: str = "images") -> str:
    """How many of those that are there are used, and how many were asked for if that is more."""
    return f"{min(there, asked):,} {what}" + (f" ({asked:,} asked for)" if asked > there else "")


def in_one_line(value: object) -> str:
    """What a value is, in one line of at most 80 characters."""
    return " ".join(repr(value).split())[:80]


def printable(text: str) -> str:
    """Escape whatever would break a line or steer a terminal: names of files and keys may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
