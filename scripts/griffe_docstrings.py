"""Docstrings as Markdown, for the reference pages: doctests become code, options a list, and asterisks stay asterisks.

An extension of griffe, named in mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): ")  # one or more, at the beginning of a line


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Fence doctests, which would be quotations, list options, and escape what would be emphasis, links or tags.

    >>> markdown("(B, *D) of [a]")
    '(B, \\\\*D) of \\\\[a\\\\]'
    >>> markdown("Draw.\\n\\nsteps: how many.").splitlines()
    ['Draw.', '', '- **steps**: how many.']
    """
    lines: list[str] = []
    fenced = listed = False
    for line in text.splitlines():
        if line.startswith(">>>") and not fenced:
            lines += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            lines.append("```")
            fenced = False
        if fenced or line.startswith("    "):
            lines.append(line)
            continue
        option = OPTION.match(line) if lines else None
        if option is not None and not listed and lines[-1]:
            lines.append("")
        listed = bool(line.strip()) and (listed or option is not None)
        name, rest = (f"- **{option[1]}**: ", line[option.end() :]) if option else ("", line)
        lines.append(name + "`".join(_escaped(rest)))
    return "\n".join([*lines, "```"] if fenced else lines)


def _escaped(line: str) -> list[str]:
    """The parts of a line between backticks; every second one is code and stays."""
    parts = line.split("`")
    return [part if number % 2 else re.sub(r"([*\[\]<>])", r"\\\1", part) for number, part in enumerate(parts)]
