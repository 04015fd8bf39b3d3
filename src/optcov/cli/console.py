"""How commands talk: results on standard output, everything for the eye on standard error."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

FIRST = os.environ.get("RANK", "0") == "0"  # under Accelerate, one process speaks for all
INTERRUPTED = 130  # the exit code of shells for Ctrl-C
TERMINATED = 143  # and for SIGTERM, as schedulers of jobs and `kill` send it

output = Console(quiet=not FIRST)
errors = Console(stderr=True, quiet=not FIRST)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: ends a command as Ctrl-C does."""


@contextmanager
def resumable(where: Path) -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end a command cleanly, and say that the same one goes on with what is in a directory."""
    try:
        with _sigterm_as_interrupt():
            yield
    except KeyboardInterrupt as stop:
        said = f"stopped; the same command goes on with what is kept in {where}: {command_line()}"
        errors.print(said, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Raise where SIGTERM strikes; only the main thread may ask for that."""

    def stop(_number: int, _frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break off what the first one ends
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def print_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[object]], console: Console | None = None
) -> None:
    """Print a table, on standard output unless told; the first column is text, the others are numbers.

    Names of files and bundles may hold brackets, so that nothing is markup: what is to be bold comes as rich's Text.
    """
    where = console or output
    table = Table(title=Text(title), title_justify="left")
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row])
    # a number that is cut off is worse than a long line, and a console prints no wider than it is
    needed = where.measure(table, options=where.options.update(width=10_000)).maximum
    Console(width=max(where.width, needed), quiet=where.quiet, stderr=where.stderr).print(table)


def announce(what: str) -> None:
    """Say what a command is about to do, after everything that can be refused has been looked at."""
    errors.print(what, markup=False, highlight=False, soft_wrap=True)


def finish(path: Path, *next_command: str) -> None:
    """End a command by where its output is, and what one would sensibly run next, word by word."""
    output.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    suggest(*next_command)


def suggest(*next_command: str) -> None:
    """Say what one would sensibly run next, such that it can be pasted into a shell."""
    output.print(f"next: {shlex.join(next_command)}", markup=False, highlight=False, soft_wrap=True)
