"""One self-contained HTML page: pictures are data in it, and a policy in its head forbids every other access."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from optcov import storage
from optcov.experiments.tables import Entry, Section, TableResult
from optcov.experiments.tables.render import section_title

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
nav ul { columns: 2; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child { text-align: left; }
tr.group th, tr.group td { border-top: 2px solid #888; }
.paper { opacity: .65; font-size: .85em; }
.error { opacity: .8; font-size: .85em; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: white; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 1rem; }
figcaption, .notes { font-size: .9rem; opacity: .85; }
.holds::before { content: "\\2713  "; color: #2a8a2a; font-weight: bold; }
.fails::before { content: "\\2717  "; color: #c0392b; font-weight: bold; }
@media (prefers-color-scheme: dark) { figure img { filter: brightness(.88); } }
.open::before { content: "?  "; font-weight: bold; }
ul.claims { list-style: none; padding-left: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem; background: #8882; }
"""
_CLAIM_CLASS = {True: "holds", False: "fails", None: "open"}


@final
@dataclass(frozen=True)
class PageSection:
    """A heading and what stands below it, as HTML."""

    title: str
    body: str


def render_page(title: str, sections: Sequence[PageSection]) -> str:
    """The whole page."""
    links = "".join(
        f'<li><a href="#section-{i}">{html.escape(section.title)}</a></li>' for i, section in enumerate(sections)
    )
    bodies = "".join(
        f'<section id="section-{i}"><h2>{html.escape(section.title)}</h2>{section.body}</section>\n'
        for i, section in enumerate(sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<nav><ul>{links}</ul></nav>\n{bodies}</body>\n</html>\n"
    )


def write_page(path: Path, title: str, sections: Sequence[PageSection]) -> None:
    """Write the page, whole or not at all."""
    storage.write_bytes(path, render_page(title, sections).encode())


def picture(png: bytes, caption: str) -> str:
    """A picture with its caption, which is also its text for those who do not see it."""
    data, text = base64.b64encode(png).decode(), html.escape(caption, quote=True)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def table_body(result: TableResult) -> str:
    """Tables with the best in bold, claims with their verdicts, notes, and the command that made it."""
    parts = [_table(section) for section in result.sections]
    if result.claims:
        parts.append("<h3>Claims of the paper</h3>" + _claims(result))
    if result.notes:
        parts.append("<ul class=notes>" + "".join(f"<li>{html.escape(note)}</li>" for note in result.notes) + "</ul>")
    return "\n".join(parts)


def made_by_body(made_by: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """The exact commands and versions, table by table."""
    parts = []
    for name, record in made_by:
        rest = {key: value for key, value in record.items() if key != "command"}
        details = html.escape(json.dumps(rest, indent=2))
        parts.append(
            f"<h3>{html.escape(name)}</h3><pre>{html.escape(str(record.get('command', '?')))}</pre>"
            f"<details><summary>versions and settings</summary><pre>{details}</pre></details>"
        )
    return "\n".join(parts)


def _table(section: Section) -> str:
    header = "".join(f"<th scope=col>{html.escape(column)}</th>" for column in section.columns)
    lines, group = [], section.rows[0].group if section.rows else ""
    for row in section.rows:
        mark = "" if row.group == group else " class=group"
        group = row.group
        cells = "".join(f"<td>{_entry(entry, section.decimals)}</td>" for entry in row.entries)
        lines.append(f"<tr{mark}><th scope=row>{html.escape(row.name)}</th>{cells}</tr>")
    title = html.escape(section_title(section))
    return (
        f"<h3>{title}</h3><div class=wide><table><thead><tr><th></th>{header}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _entry(entry: Entry, decimals: int) -> str:
    number, _, error = entry.ours(decimals).partition(" ± ")
    ours = html.escape(number) + (f' <span class="error">± {html.escape(error)}</span>' if error else "")
    paper = entry.published()
    theirs = f' <span class="paper">({html.escape(paper)})</span>' if paper else ""
    return (f"<b>{ours}</b>" if entry.best else ours) + theirs


def _claims(result: TableResult) -> str:
    lines = []
    for claim in result.claims:
        text = f"{html.escape(claim.statement)}: <i>{claim.verdict}</i>"
        evidence = f'<span class="error">{html.escape(claim.evidence)}</span>'
        lines.append(f'<li class="{_CLAIM_CLASS[claim.holds]}">{text} {evidence}</li>')
    return f"<ul class=claims>{''.join(lines)}</ul>"
