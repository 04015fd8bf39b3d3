"""A finished table as Markdown, CSV, LaTeX and JSON: best in bold, ours beside the paper's."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

from optcov import storage
from optcov.experiments.tables.result import Entry, Section, TableResult

_LATEX = {  # what TeX reserves, and what its fonts lack
    **{character: f"\\{character}" for character in "&%#_${}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    ">": r"$>$",
    "<": r"$<$",
    "×": r"$\times$",
}


def write_table(result: TableResult, directory: Path) -> list[Path]:
    """Write NAME.md, .csv, .tex and .json."""
    directory = Path(directory)
    texts = {"md": markdown(result), "csv": comma_separated(result), "tex": latex(result)}
    paths = [directory / f"{result.name}.{suffix}" for suffix in (*texts, "json")]
    with storage.claim(directory / ".lock", wait=True):  # commands that share the cells write their tables in turns
        storage.remove_leftovers(directory, [f".{path.name}.*.part" for path in paths])
        for path, text in zip(paths, texts.values(), strict=False):
            storage.write_bytes(path, text.encode())
        storage.write_json(paths[-1], result.to_json())
    return paths


def markdown(result: TableResult) -> str:
    """Ours in each cell, the paper's in brackets behind it."""
    parts = [f"## {result.title}"]
    for section in result.sections:
        parts.append(f"### {section_title(section)}")
        lines = [["", *section.columns], ["---", *["---:"] * len(section.columns)]]
        lines += [[row.name, *(entry_text(entry, section, "**{}**") for entry in row.entries)] for row in section.rows]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if result.claims:
        parts.append("Claims of the paper:")
        parts.append("\n".join(f"- {c.verdict}: {c.statement} ({c.evidence})" for c in result.claims))
    if result.notes:
        parts.append("\n".join(f"- {note}" for note in result.notes))
    if "command" in result.made_by:
        parts.append(f"Made by `{result.made_by['command']}`.")
    return "\n\n".join(parts) + "\n"


def section_title(section: Section) -> str:
    """The heading, and whose numbers are in brackets, if there are any."""
    compared = any(entry.published() for row in section.rows for entry in row.entries)
    return section.heading + (f" (the paper's {section.paper_setting} in brackets)" if compared else "")


def comma_separated(result: TableResult) -> str:
    """One line per number."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["section", "group", "row", "column", "value", "error", "paper", "paper_setting", "best", "text"])
    for section in result.sections:
        for row in section.rows:
            for column, e in zip(section.columns, row.entries, strict=True):
                paper = e.paper_text or _number(e.paper)
                numbers = [_number(e.value), _number(e.error), paper, section.paper_setting or ""]
                texts = [int(e.best), e.text or ""]
                writer.writerow([section.heading, row.group, row.name, column, *numbers, *texts])
    return stream.getvalue()


def latex(result: TableResult) -> str:
    """A booktabs table per section."""
    parts = []
    for section in result.sections:
        comment = " ".join(f"{result.title}; {section_title(section)}".split())  # a second line would be typeset
        lines = [f"% {comment}", rf"\begin{{tabular}}{{l{'r' * len(section.columns)}}}"]
        lines += [r"\toprule", " & ".join(["", *(_escape(c) for c in section.columns)]) + r" \\", r"\midrule"]
        group = section.rows[0].group if section.rows else ""
        for row in section.rows:
            if row.group != group:
                lines.append(r"\midrule")
                group = row.group
            entries = [entry_text(entry, section, r"\textbf{{{}}}", _escape) for entry in row.entries]
            lines.append(" & ".join([_escape(row.name), *entries]) + r" \\")
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def entry_text(entry: Entry, section: Section, bold: str = "{}", escape: Callable[[str], str] = str) -> str:
    """Ours, in bold if it is the best, with the paper's in brackets."""
    ours, paper = (escape(text) for text in (entry.ours(section.decimals), entry.published()))
    return (bold.format(ours) if entry.best else ours) + (f" ({paper})" if paper else "")


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"
