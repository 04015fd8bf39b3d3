"""Options that hold several values, separated by commas."""

from __future__ import annotations


def names(text: str) -> list[str]:
    """The words of a list; none of an empty text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, option: str, example: str) -> list[int]:
    """The whole numbers of a list, one at least."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is not a list of whole numbers such as {example}") from error
