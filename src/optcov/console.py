"""How commands talk, and what their options mean: results on standard output, messages on standard error."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from optcov.progress import FIRST
from optcov.text_table import printable

if TYPE_CHECKING:
    from optcov.bundle import Bundle
    from optcov.bundle.sweeping import Scored

Settings = TypeVar("Settings")

INTERRUPTED = 130  # the exit code of shells for Ctrl-C
TERMINATED = 143  # and for SIGTERM, as schedulers of jobs and `kill` send it
MAX_SEED = 2**63 - 1  # torch's generators take twice as much, and repeats take the seeds behind


class PlainConsole(Console):
    """A console that escapes what would steer the terminal, in every text that it is given; lines may break."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does."""
        super().print(
            *("\n".join(map(printable, o.split("\n"))) if isinstance(o, str) else o for o in objects), **options
        )


output: Console = PlainConsole(quiet=not FIRST)
errors: Console = PlainConsole(stderr=True, quiet=not FIRST)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: ends a command as Ctrl-C does."""


@contextmanager
def resumable(where: Path) -> Iterator[None]:
    """Let Ctrl-C or SIGTERM end a command cleanly, and say that the same one goes on with what is in a directory."""
    try:
        with _sigterm_as_interrupt():
            yield
    except KeyboardInterrupt as stop:
        announce(f"stopped; the same command goes on with what is kept in {where}: {command_line()}")
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
    """End the program by one sentence and exit code 2; a process among several says which it is."""
    process = "" if FIRST else f" in process {os.environ['RANK']}"
    _say(Console(stderr=True), f"error{process}: {message}")
    sys.exit(2)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a type of its own for GPUs only."""
    said = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in said or "out of memory" in said


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
    table = Table(title=Text(printable(title)), title_justify="left")
    for number, name in enumerate(header):
        table.add_column(Text(printable(name)), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*[cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row])
    # a number that is cut off is worse than a long line, and a console prints no wider than it is
    needed = where.measure(table, options=where.options.update(width=10_000)).maximum
    Console(width=max(where.width, needed), quiet=where.quiet, stderr=where.stderr).print(table)


def announce(what: str) -> None:
    """Say what a command is about to do, after everything that can be refused has been looked at."""
    _say(errors, what)


def _say(console: Console, text: str) -> None:
    """One line as it is, however long: no markup, no colours, nothing that steers the terminal."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def tell_clamps(rates: Mapping[str, tuple[float, float]]) -> None:
    """Say how many variances of each covariance were out of bounds."""
    from optcov.covariances import clamped_in_words

    for name, (below, above) in rates.items():
        if below or above:
            announce(f"{name}: {clamped_in_words(name, below, above)}")


def tell_left_out(bundle: Bundle) -> None:
    """Say which settings of a foreign network a bundle does without."""
    imported = bundle.provenance.get("imported")
    names = imported.get("left_out") if isinstance(imported, Mapping) else None
    if isinstance(names, list) and names:
        listed = ", ".join(repr(str(name)[:80]) for name in names[:10])
        announce(f"leaves out {listed} of the network's config: off there, and unknown to the diffusers installed here")


def finish(path: Path, *next_command: str) -> None:
    """End a command by where its output is, and what one would sensibly run next, word by word."""
    _say(output, f"wrote {path}")
    suggest(*next_command)


def suggest(*next_command: str) -> None:
    """Say what one would sensibly run next, such that it can be pasted into a shell."""
    _say(output, f"next: {shlex.join(next_command)}")


def default_out(bundle: str | Path, *words: str) -> Path:
    """Where output goes that was given no place, by the bundle's name: runs of different bundles do not meet."""
    name = Path(bundle).resolve().name
    return Path("out") / re.sub(r"[^\w.]+", "-", "-".join([name, *words]).lower()).strip("-.")


def check_out(value: Path | None) -> Path | None:
    """Refuse to write other files into a bundle, which they would spoil; the callback of every --out but a bundle's."""
    if value == Path():
        raise ValueError("--out is empty; name a directory, or leave it out")
    if value is not None and (value / "config.json").is_file() and (value / "unet").is_dir():
        raise ValueError(f"--out {value} is a bundle, which other files would spoil; choose another directory")
    return value


def check_seed(value: int) -> int:
    """Refuse seeds that no generator takes; the callback of every --seed."""
    if not 0 <= value <= MAX_SEED:
        raise ValueError(f"--seed {value} is out of range; use a whole number from 0 to {MAX_SEED}")
    return value


def names(text: str) -> list[str]:
    """The words of a list; none of an empty text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, option: str, example: str) -> list[int]:
    """The whole numbers of a list, one at least."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is not a list of whole numbers such as {example}") from error


def was_given(context: typer.Context, option: str) -> bool:
    """Whether an option such as --batch-size stands on the command line."""
    names = {name: one.name for one in context.command.params for name in one.opts}
    source = context.get_parameter_source(names[option] or "")
    return source is not None and source.name == "COMMANDLINE"


def settings_of(kind: type[Settings], context: typer.Context) -> Settings:
    """Settings whose fields are options of the same names; those that are no options keep their defaults."""
    named: Any = fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: context.params[field.name] for field in named if field.name in context.params})


def some_images(data: str, model: Bundle, split: str, count: int, labels: bool = True) -> Scored:
    """The first images of a split, in an order whose first stand for all; labels: whether the network is told them."""
    from optcov.bundle.sweeping import Scored
    from optcov.data import load_mixed
    from optcov.data.tensors import fitted_to

    found = load_mixed(data, split)
    taken = found if model.decoder is None else model.as_latents(found.select(slice(0, count)))
    return Scored(fitted_to(taken, model.image_shape, model.name), count, split, labels)


def images_to_score(data: str, model: Bundle, split: str, count: int, labels: bool = True) -> Scored:
    """The same, refused now if the network cannot be asked about them; captions that nothing encodes are said."""
    from optcov.networks.calls import takes_texts

    scored = some_images(data, model, split, count, labels)
    scored.told(model)
    if scored.whole.captions is not None and takes_texts(model.unet):
        announce(f"{scored.whole.name}: captions are left out, since {model.name} holds nothing that encodes them")
    return scored
