"""What options mean: lists separated by commas, places that were not given, counts that were asked for."""

from __future__ import annotations

import re
from pathlib import Path

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


def check_out(value: Path | None) -> Path | None:
    """Refuse to write other files into a bundle, which they would spoil; the callback of every --out but a bundle's."""
    if value is not None and (value / "config.json").is_file() and (value / "unet").is_dir():
        raise ValueError(f"--out {value} is a bundle, which other files would spoil; choose another directory")
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
