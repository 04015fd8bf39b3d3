"""Docstrings as Markdown, for the reference pages: doctests become code, and asterisks stay asterisks.

An extension of griffe, named in mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Fence doctests, which would be quotations, and escape what would be emphasis, links or tags.

    >>> markdown("(B, *D) of [a]")
    '(B, \\\\*D) of \\\\[a\\\\]'
    """
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        if line.startswith(">>>") and not fenced:
            lines += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            lines.append("```")
            fenced = False
        code = fenced or line.startswith("    ")
        lines.append(line if code else "`".join(_escaped(line)))
    return "\n".join([*lines, "```"] if fenced else lines)


def _escaped(line: str) -> list[str]:
    """The parts of a line between backticks; every second one is code and stays."""
    parts = line.split("`")
    return [part if number % 2 else re.sub(r"([*\[\]<>])", r"\\\1", part) for number, part in enumerate(parts)]
