"""The tables, verdicts and plot of docs/results.md, and the tables of README.md and docs/restoration.md.

`python scripts/results_page.py` writes them anew from measurements/MODEL/*.jsonl, which `optcov table` fills, and from
measurements/restoration/MODEL.jsonl, which benchmarks/restoration.py fills. No number is typed by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import restoration_tables

from optcov.experiments.tables.claims import Difference, row_differences
from optcov.experiments.tables.distances import BEYOND, DISCRETE, distance_entry
from optcov.experiments.tables.result import Entry, Row, Section
from optcov.experiments.tables.scoring import row_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
RESTORATION = ROOT / "docs" / "restoration.md"
PLOT = ROOT / "docs" / "images" / "results.png"
MEASURED = ROOT / "measurements"
BEGIN, END = "<!-- made by scripts/results_page.py: {} -->", "<!-- /made: {} -->"
SCHEDULE = "linear"
PAPER = tuple(name for names in DISCRETE.values() for name in names)
OURS = tuple(name for names in BEYOND.values() for name in names)
PLOTTED = 10  # steps of the plot of images
PEERS = ("DPM-Solver++", "SDE-DPM-Solver++", "UniPC", "UniPC, Karras times")
COLOURS = {"beta": "#d98c3f", "tilde": "#909090", "A-": "#8a63b8", "SN-": "#3a9d6e", "NPR-": "#1f6fb4", "DDIM": "#c44"}
BETTER_BITS = (("NPR-DDPM", "A-DDPM"), ("A-DDPM", "DDPM, beta"), ("NPR-DDPM", "SN-DDPM"), ("SN-DDPM", "A-DDPM"))
BETTER_IMAGES = (
    *(("SN-DDPM", "A-DDPM"), ("NPR-DDPM", "A-DDPM"), ("SN-DDPM", "NPR-DDPM"), ("A-DDPM", "DDPM, beta-tilde")),
    *(("SN-DDIM", "A-DDIM"), ("NPR-DDIM", "A-DDIM"), ("SN-DDIM", "DDIM"), ("NPR-DDIM", "DDIM"), ("A-DDIM", "DDIM")),
    *(("A-DDIM", "A-DDPM"), ("NPR-DDIM", "NPR-DDPM")),
    *(("CNPR-DDPM", "NPR-DDPM"), ("CNPR-DDIM", "NPR-DDIM"), ("UniPC", "NPR-DDPM"), ("UniPC", "NPR-DDIM")),
    *(("Bridge 2M", "NPR-DDPM"), ("Bridge 2M", "UniPC"), ("Bridge 2M", "UniPC, Karras times")),
)


@final
@dataclass(frozen=True)
class Measured:
    """What was measured of a model on the linear schedule, along even times."""

    bits: Mapping[str, Mapping[int, Mapping[str, Any]]]  # row -> K -> bits_per_dim, and the difference from NPR
    gains: Mapping[str, Mapping[int, Mapping[str, float]]]  # row -> K -> optimal less even times
    images: Mapping[str, Mapping[int, Mapping[str, Any]]]  # row -> K -> result of a cell
    distance: str  # FD-fashion or FID
    samples: int

    @staticmethod
    def of(model: str, measured: Path = MEASURED) -> Measured:
        """From the cells in a directory."""
        paths = sorted((measured / model).glob("*.jsonl"))
        cells = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        here = [cell for cell in cells if cell["settings"].get("schedule_name") == SCHEDULE]
        drawn = [c for c in here if c["kind"] == "distance" and not c["settings"]["times"]]
        most = max((cell["settings"]["samples"] for cell in drawn), default=0)
        images: dict[str, dict[int, Any]] = {}
        for cell in drawn:
            if cell["settings"]["samples"] == most:
                images.setdefault(cell["settings"]["method"], {})[cell["settings"]["steps"]] = cell["result"]
        scored = [c for c in here if c["kind"] == "likelihood" and c["settings"]["image_seed"] is None]
        largest = max(scored, key=lambda cell: cell["settings"]["images"], default=None)
        bits: dict[str, dict[int, Any]] = {}
        gains: dict[str, dict[int, Any]] = {}
        for row in largest["result"]["rows"] if largest else []:
            place = bits if row["kind"] == "ET" else gains
            place.setdefault(row_of(row["covariance"]), {})[row["K"]] = row if row["kind"] == "ET" else row["gain"]
        return Measured(bits, gains, images, drawn[0]["result"]["name"] if drawn else "", most)

    def section(self) -> Section:
        """The distances as a table of the package."""
        steps = sorted({K for row in self.images.values() for K in row})
        rows = [
            Row(name, tuple(distance_entry(row[K]) if K in row else Entry(text="") for K in steps))
            for name, row in self.images.items()
        ]
        return Section(SCHEDULE, tuple(f"K = {K}" for K in steps), tuple(rows))


def bits_table(found: Measured) -> str:
    """Bits/dim by method and number of steps."""
    return _table(found.bits, (10, 25, 50, 100, 200, 1000), lambda cell: _number(cell["bits_per_dim"], 3))


def images_table(found: Measured) -> str:
    """Distances by method and number of steps."""
    return _table(found.images, sorted({K for row in found.images.values() for K in row}), lambda c: _distance(c, 2))


def _table(
    rows: Mapping[str, Mapping[int, Any]], lengths: Iterable[int], words: Callable[[Mapping[str, Any]], str]
) -> str:
    steps = [K for K in lengths if any(K in row for row in rows.values())]
    lines = [f"| | {' | '.join(f'K = {K}' for K in steps)} |", "|---|" + "---:|" * len(steps)]
    for name in (*PAPER, *OURS, *PEERS):
        row = rows.get(name, {})
        if any(K in row for K in steps):
            lines.append(f"| {name} | {' | '.join(words(row[K]) if K in row else '' for K in steps)} |")
    return "\n".join(lines)


def claims(found: Measured) -> str:
    """Who is better than whom, with the differences."""
    lines = ["| | holds | difference |", "|---|---|---|"]
    for better, worse in BETTER_BITS:
        lines += _line(f"{better} has lower bits/dim than {worse}", _bit_differences(found, better, worse))
    for name in ("A-DDPM", "NPR-DDPM"):
        gains = {K: gain for K, gain in found.gains.get(name, {}).items() if gain["standard_error"] > 0}
        lines += _line(
            f"{name} has lower bits/dim at optimal timesteps",
            [Difference(f"K = {K}", g["mean"], g["standard_error"]) for K, g in gains.items()],
        )
    section = found.section()
    for better, worse in BETTER_IMAGES:
        lines += _line(f"{better} draws better images than {worse}", row_differences(section, better, worse))
    return "\n".join(lines)


def _bit_differences(found: Measured, better: str, worse: str) -> list[Difference]:
    """Paired by image and noise where one of the two is NPR; else the errors of both differences from NPR count."""
    first, second = found.bits.get(better, {}), found.bits.get(worse, {})
    result = []
    for K in sorted(set(first) & set(second)):
        from_npr = [row[K]["difference"] for row in (first, second) if row[K]["difference"]]
        known = from_npr or [row[K]["bits_per_dim"] for row in (first, second)]
        mean = first[K]["bits_per_dim"]["mean"] - second[K]["bits_per_dim"]["mean"]
        result.append(Difference(f"K = {K}", mean, math.hypot(*(part["standard_error"] for part in known))))
    return result


def _line(statement: str, differences: Iterable[Difference]) -> list[str]:
    """One row of the table of claims; none without a measurement."""
    shown = list(differences)
    if not shown:
        return []
    verdicts = {difference.holds() for difference in shown}
    words = {True: "yes", False: "**no**", None: "no clear difference"}
    verdict = words[verdicts.pop()] if len(verdicts) == 1 else "it depends on K"
    parts = [f"{d.where.rpartition(', ')[2]}: {_signed(d)}" for d in shown]
    return [f"| {statement} | {verdict} | {'; '.join(parts)} |"]


def _signed(difference: Difference) -> str:
    if difference.error is None:
        return f"{difference.mean:+.2f}".replace("-", "−")
    decimals = 3 if difference.error < 0.015 else 2
    return f"{difference.mean:+.{decimals}f} ± {difference.error:.{decimals}f}".replace("-", "−")


def _number(value: Mapping[str, float], decimals: int) -> str:
    return f"{value['mean']:.{decimals}f} ± {value['standard_error']:.{decimals}f}"


def _distance(result: Mapping[str, Any], decimals: int) -> str:
    entry = distance_entry(dict(result))
    return f"{entry.value:.{decimals}f} ± {entry.error:.{decimals}f}"


def readme_table(found: Measured, what: str) -> str:
    """A small table of README.md."""
    shown = {
        "bits": ("DDPM, beta", "A-DDPM", "SN-DDPM", "NPR-DDPM"),
        "images": (
            *("DDPM, beta-tilde", "A-DDPM", "NPR-DDPM", "DDIM", "NPR-DDIM"),
            *("UniPC", "UniPC, Karras times", "Bridge 2M"),
        ),
    }[what]
    place = found.bits if what == "bits" else found.images
    steps = [K for K in (10, 25) if any(K in place.get(name, {}) for name in shown)]
    lines = [f"| method | {' | '.join(f'K = {K}' for K in steps)} |", "|---|" + "--:|" * len(steps)]
    for name in shown:
        row = place.get(name, {})
        cells = [
            "" if K not in row else _number(row[K]["bits_per_dim"], 2) if what == "bits" else _distance(row[K], 2)
            for K in steps
        ]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts(models: Iterable[str]) -> dict[str, str]:
    """What the page holds, by the name of its place."""
    made = {}
    for model in models:
        found = Measured.of(model)
        made |= {f"bits of {model}": bits_table(found), f"images of {model}": images_table(found)}
        made[f"claims on {model}"] = claims(found)
    return made


def inserted(page: str, made: Mapping[str, str]) -> str:
    """The page with its parts in their places; parts that it has no place for are left out."""
    for name, part in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin in page:
            before, after = page.split(begin)[0], page.split(end)[1]
            page = f"{before}{begin}\n{part}\n{end}{after}"
    return page


def models() -> list[str]:
    """Embedded models with measurements."""
    return [name for name in ("fashion", "cifar10") if any((MEASURED / name).glob("*.jsonl"))]


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    readme = {f"README {what}": readme_table(Measured.of("fashion"), what) for what in ("bits", "images")}
    restored = {
        f"restoration of {path.stem}": restoration_tables.page_part(restoration_tables.Comparison.of(path))
        for path in (MEASURED / "restoration").glob("*.jsonl")
        if path.stem in ("fashion", "cifar10")
    }
    made = {PAGE: parts(models()), README: readme, RESTORATION: restored}
    return {path: inserted(path.read_text("utf-8"), tables) for path, tables in made.items()}


def plot(found: Measured, path: Path) -> None:
    """Bits/dim against the number of steps, and the distances of images in ten steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in PAPER:
        row = dict(sorted(found.bits.get(name, {}).items()))
        if row:
            values = [cell["bits_per_dim"]["mean"] for cell in row.values()]
            left.plot(list(row), values, color=_colour(name), marker="o", markersize=3, label=name)
    steps = sorted({K for row in found.bits.values() for K in row})
    left.set(xscale="log", yscale="log", xlabel="steps", xticks=steps, xticklabels=[str(K) for K in steps])
    left.set(title="bits/dim, evenly spaced timesteps", ylim=(3, 13))
    left.set(yticks=[3, 4, 5, 6, 8, 10], yticklabels=["3", "4", "5", "6", "8", "10"])
    left.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.03, 1.02))
    shown = {name: row[PLOTTED] for name, row in found.images.items() if PLOTTED in row and name != "DDPM, beta"}
    best_last = sorted(shown, key=lambda name: -float(distance_entry(shown[name]).value or 0))
    for place, name in enumerate(best_last):
        entry = distance_entry(shown[name])
        right.errorbar(entry.value, place, xerr=entry.error, color=_colour(name), marker="o", capsize=3)
    right.set(title=f"{found.distance} in {PLOTTED} steps", yticks=range(len(best_last)), yticklabels=best_last)
    right.set_xlim(left=0)
    for axes in (left, right):
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _colour(name: str) -> str:
    found = (colour for part, colour in COLOURS.items() if name.startswith(part) or name.endswith(part))
    return next(found, "#404040")


def main() -> None:
    """Write the pages' parts and the plot."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    plot(Measured.of("fashion"), PLOT)


if __name__ == "__main__":
    main()
