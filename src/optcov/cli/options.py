"""What options mean: lists by commas, places that were not given, settings by their names, images to score."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import typer

    from optcov.bundle import Bundle
    from optcov.bundle.scoring import Scored

Settings = TypeVar("Settings")

MAX_SEED = 2**63 - 1  # torch's generators take twice as much, and repeats take the seeds behind


def default_out(bundle: str | Path, *words: str) -> Path:
    """Where output goes that was given no place, by the bundle's name: runs of different bundles do not meet."""
    name = Path(bundle).resolve().name
    return Path("out") / re.sub(r"[^\w.]+", "-", "-".join([name, *words]).lower()).strip("-.")


def counted(there: int, asked: int, what: str) -> str:
    """How many there are, and how many were asked for if that is more."""
    return f"{there:,} {what}" + (f" ({asked:,} asked for)" if asked > there else "")


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


def settings_of(kind: type[Settings], context: typer.Context) -> Settings:
    """Settings whose fields are options of the same names; those that are no options keep their defaults."""
    named: Any = fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: context.params[field.name] for field in named if field.name in context.params})


def some_images(data: str, model: Bundle, split: str, count: int) -> Scored:
    """The first images of a split, in an order whose first stand for all."""
    from optcov.bundle.scoring import Scored
    from optcov.data import load_mixed
    from optcov.data.tensors import fitted_to

    return Scored(fitted_to(load_mixed(data, split), model.image_shape, model.name), count, split)
