"""How commands talk: results on standard output, everything for the eye on standard error."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

FIRST = os.environ.get("RANK", "0") == "0"  # under Accelerate, one process speaks for all
INTERRUPTED = 130  # the exit code of shells for Ctrl-C

output = Console(quiet=not FIRST)
errors = Console(stderr=True, quiet=not FIRST)

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


@contextmanager
def resumable(where: Path) -> Iterator[None]:
    """Let Ctrl-C end a command cleanly, and say that the same command goes on with what is in a directory."""
    try:
        yield
    except KeyboardInterrupt:
        said = f"stopped; the same command goes on with what is kept in {where}: {command_line()}"
        errors.print(said, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def command_line() -> str:
    """The command line as the user gave it, without the directory of the program."""
    return " ".join(["optcov", *(shlex.quote(part) for part in sys.argv[1:])])


def fail(message: str) -> NoReturn:
    """End the program by one sentence and exit code 2; a process among several says which it is.

    Names of files may hold anything: what would break the line or steer a terminal is escaped.
    """
    process = "" if FIRST else f" in process {os.environ['RANK']}"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    Console(stderr=True).print(f"error{process}: {text}", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)


def print_json(content: Any) -> None:
    """Print one JSON document on standard output, for machines."""
    if FIRST:
        print(json.dumps(content, indent=2, allow_nan=False))  # noqa: T201


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*[str(cell) for cell in row])
    # a number that is cut off is worse than a long line, and a console prints no wider than it is
    needed = output.measure(table, options=output.options.update(width=10_000)).maximum
    Console(width=max(output.width, needed), quiet=output.quiet).print(table)


def announce(what: str) -> None:
    """Say what a command is about to do, after everything that can be refused has been looked at."""
    errors.print(what, markup=False, highlight=False, soft_wrap=True)


def finish(path: Path, next_command: str | None = None) -> None:
    """End a command by where its output is, and what one would sensibly run next."""
    output.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if next_command:
        output.print(f"next: {next_command}", markup=False, highlight=False, soft_wrap=True)
