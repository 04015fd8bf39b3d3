"""Live progress on standard error: how much is done, how fast, and the time left; silent where there is no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")
FIRST = os.environ.get("RANK", "0") == "0"  # under Accelerate, one process speaks for all


def track(
    items: Iterable[Item],
    total: int,
    what: str,
    unit: str = "steps",
    size: Callable[[Item], int] = lambda _: 1,
    show: bool = True,
) -> Iterator[Item]:
    """Pass items on, with a bar that shows how many units are done, the rate and the time left.

    size: how many units an item stands for. show: False for silence.
    """
    with _bar(show) as progress:
        task = progress.add_task(what, total=total, rate="")
        for item in items:
            progress.advance(task, size(item))
            _show_rate(progress, task, unit)
            yield item


def fresh(done: Callable[[Item], float]) -> Callable[[Item], int]:
    """Turn how much is done by now, of items that tell it, into the size of each item."""
    before = 0.0

    def size(item: Item) -> int:
        nonlocal before
        step, before = done(item) - before, done(item)
        return round(step)

    return size


@contextmanager
def watch_passes(what: str, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Give a function of (done, total) to call after each batch of a pass; a pass that begins anew is counted."""
    passes = 0
    with _bar(show) as progress:
        task = progress.add_task(what, total=None, rate="")

        def note(done: int, total: int) -> None:
            nonlocal passes
            if done == 1:
                passes += 1
                number = f", pass {passes}" if passes > 1 else ""
                progress.reset(task, total=total, description=f"{what}{number}", rate="")
            progress.update(task, completed=done)
            _show_rate(progress, task, "batches")

        yield note


def _bar(show: bool) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    return Progress(*columns, console=console, disable=not (show and FIRST and console.is_terminal))


def _show_rate(progress: Progress, task: TaskID, unit: str) -> None:
    state = progress.tasks[task]
    progress.update(task, rate=f"{state.completed / state.elapsed:.3g} {unit}/s" if state.elapsed else "")
