"""Options that hold several values, separated by commas."""

from __future__ import annotations

MAX_SEED = 2**63 - 1  # torch's generators take twice as much, and repeats take the seeds behind


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
