"""The short page of results, docs/what-holds.md: table, claims and plot, made of the tables of docs/results.md.

`python scripts/short_results.py` writes them anew. The tables of docs/results.md are held to the committed cells by
tests/experiments/test_measurements.py, so no number is typed twice.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APPENDIX, PAGE = ROOT / "docs" / "results.md", ROOT / "docs" / "what-holds.md"
PLOT = ROOT / "docs" / "images" / "results.png"
BEGIN, END = "<!-- made by scripts/short_results.py: {} -->", "<!-- /made: {} -->"
METHODS = ("DDPM, beta", "DDPM, beta-tilde", "A-DDPM", "SN-DDPM", "NPR-DDPM", "DDIM", "A-DDIM", "SN-DDIM", "NPR-DDIM")
PEERS = ("DPM-Solver++", "UniPC")
SHOWN = ("K = 10", "K = 25")
COLOURS = {"beta": "#d98c3f", "tilde": "#909090", "A-": "#8a63b8", "SN-": "#3a9d6e", "NPR-": "#1f6fb4", "DDIM": "#c44"}

Table = dict[str, dict[str, str]]  # row -> column -> cell


def section(text: str, heading: str) -> list[str]:
    """The lines below a heading, up to the next."""
    lines = text.splitlines()
    begin = lines.index(heading) + 1
    return lines[begin : next((n for n in range(begin, len(lines)) if lines[n].startswith("#")), len(lines))]


def tables(text: str, heading: str) -> list[list[list[str]]]:
    """The tables below a heading, each a list of rows of cells; its first row is the header."""
    found: list[list[list[str]]] = []
    before = ""
    for line in section(text, heading):
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            if not re.fullmatch(r"[|\s:-]+", line):
                found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        before = line
    return found


def numbers(text: str, heading: str) -> Table:
    """The first table below a heading, without the paper's numbers."""
    (_, *columns), *rows = tables(text, heading)[0]
    return {name: dict(zip(columns, map(_ours, cells), strict=True)) for name, *cells in rows}


def claims(text: str, heading: str) -> list[tuple[str, str]]:
    """What the paper claims, and whether it holds."""
    found = [rows for rows in tables(text, heading) if rows[0][0] == "claim of the paper"]
    return [(row[0], row[1]) for rows in found for row in rows[1:]]


def made(text: str) -> dict[str, str]:
    """The parts of the page by name, as Markdown."""
    bits, images = numbers(text, "## Likelihoods"), numbers(text, "## Samples")
    peers = numbers(text, "### Beside diffusers' schedulers")
    lines = ["| | " + " | ".join(f"{kind}, {K}" for kind in ("bits/dim", "FD-fashion") for K in SHOWN) + " |"]
    lines.append("|---|" + "---:|" * 2 * len(SHOWN))
    for name in (*METHODS, *PEERS):
        row = [bits.get(f"ET {name}", {}).get(K, "") for K in SHOWN]
        row += [(images.get(name) or peers[name]).get(K, "") for K in SHOWN]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    told = ["| claim of the paper | on the embedded model |", "|---|---|"]
    for heading in ("## Likelihoods", "## Samples"):
        told += [f"| {claim} | {verdict} |" for claim, verdict in claims(text, heading)]
    return {"numbers": "\n".join(lines), "claims": "\n".join(told)}


def inserted(page: str, parts: dict[str, str]) -> str:
    """The page with its parts in their places."""
    for name, part in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, after = page.split(begin)[0], page.split(end)[1]
        page = f"{before}{begin}\n{part}\n{end}{after}"
    return page


def plot(text: str, path: Path) -> None:
    """Bits/dim and distances against the number of steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, heading, prefix in ((left, "## Likelihoods", "ET "), (right, "## Samples", "")):
        table = numbers(text, heading)
        for name in METHODS:
            row = table.get(prefix + name)
            if row is not None:
                steps = [int(K.removeprefix("K = ")) for K in row]
                line = "--" if name.endswith("DDIM") else "-"
                values = [float(cell.split(" ")[0]) for cell in row.values()]
                axes.plot(steps, values, line, color=_colour(name), marker="o", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel="steps", xticks=steps, xticklabels=[str(K) for K in steps])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    left.set(title="bits/dim, even times", ylim=(3, 9), yticks=[3, 4, 5, 6, 8], yticklabels=["3", "4", "5", "6", "8"])
    right.set(title="FD-fashion", ylim=(0.35, 3), yticks=[0.5, 1, 2], yticklabels=["0.5", "1", "2"])
    figure.legend(handles=right.get_lines(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _colour(name: str) -> str:
    return next(colour for part, colour in COLOURS.items() if name.startswith(part) or name.endswith(part))


def _ours(cell: str) -> str:
    return cell.partition("(")[0].replace("*", "").strip()


def main() -> None:
    """Write the page's parts and its plot."""
    text = APPENDIX.read_text(encoding="utf-8")
    PAGE.write_text(inserted(PAGE.read_text(encoding="utf-8"), made(text)), encoding="utf-8")
    plot(text, PLOT)


if __name__ == "__main__":
    main()
