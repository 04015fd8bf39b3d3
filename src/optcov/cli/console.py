"""How commands talk: results on standard output, everything for the eye on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

output = Console()
errors = Console(stderr=True)

Item = TypeVar("Item")


def track(
    items: Iterable[Item], total: int, what: str, unit: str = "steps", size: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """Pass items on, with a bar that shows how many units are done, the rate and the time left.

    size: how many units an item stands for.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=errors) as progress:
        task = progress.add_task(what, total=total, rate="")
        for item in items:
            progress.advance(task, size(item))
            state = progress.tasks[0]
            progress.update(task, rate=f"{state.completed / state.elapsed:.3g} {unit}/s" if state.elapsed else "")
            yield item


def print_json(content: Any) -> None:
    """Print one JSON document on standard output, for machines."""
    print(json.dumps(content, indent=2, allow_nan=False))  # noqa: T201


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*[str(cell) for cell in row])
    # a number that is cut off is worse than a long line
    needed = output.measure(table, options=output.options.update(width=10_000)).maximum
    output.print(table, width=max(output.width, needed), crop=False)


def finish(path: Path, next_command: str | None = None) -> None:
    """End a command by where its output is, and what one would sensibly run next."""
    output.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if next_command:
        output.print(f"next: {next_command}", markup=False, highlight=False, soft_wrap=True)
