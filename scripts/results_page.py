"""The tables, verdicts and plots of the pages of results, and the tables of README.md.

`python scripts/results_page.py` writes them anew from measurements/MODEL/*.jsonl, which `optcov table` fills, and from
measurements/restoration/MODEL.jsonl, which benchmarks/restoration.py fills. No number is typed by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import restoration_tables

from optcov.canvas import colour_of, open_frame
from optcov.experiments.tables.claims import Difference, row_differences
from optcov.experiments.tables.distances import BEYOND, DISCRETE, distance_entry
from optcov.experiments.tables.published import SETTING_OF_SCHEDULE, published_value
from optcov.experiments.tables.result import Entry, Row, Section
from optcov.experiments.tables.scoring import row_of
from optcov.metrics.extractors import FID

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
PAGE, CLAIMS, README = ROOT / "docs" / "results.md", ROOT / "docs" / "results-claims.md", ROOT / "README.md"
RESTORATION = ROOT / "docs" / "results-restoration.md"
PLOT = ROOT / "docs" / "images" / "results.png"
MEASURED = ROOT / "measurements"
BEGIN, END = "<!-- made by scripts/results_page.py: {} -->", "<!-- /made: {} -->"
SCHEDULE = "linear"
PAPER_SETTING = {"cifar10": SETTING_OF_SCHEDULE[SCHEDULE]}  # the paper has other data besides, but no Fashion-MNIST
PAPER = tuple(name for names in DISCRETE.values() for name in names)
OURS = tuple(name for names in BEYOND.values() for name in names)
PLOTTED = 10  # steps of the plot of images, and of README's
DATA = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
PEERS = ("DPM-Solver++", "SDE-DPM-Solver++", "UniPC", "UniPC, Karras times")
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
    optimal: Mapping[str, Mapping[int, Mapping[str, Any]]]  # the same at optimal timesteps, and the gain over even ones
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
        bits: dict[str, dict[str, dict[int, Any]]] = {"ET": {}, "OT": {}}
        for row in largest["result"]["rows"] if largest else []:
            bits[row["kind"]].setdefault(row_of(row["covariance"]), {})[row["K"]] = row
        return Measured(bits["ET"], bits["OT"], images, drawn[0]["result"]["name"] if drawn else "", most)

    def section(self) -> Section:
        """The distances as a table of the package."""
        steps = sorted({K for row in self.images.values() for K in row})
        rows = [
            Row(name, tuple(distance_entry(row[K]) if K in row else Entry(text="") for K in steps))
            for name, row in self.images.items()
        ]
        return Section(SCHEDULE, tuple(f"K = {K}" for K in steps), tuple(rows))


def bits_table(rows: Mapping[str, Mapping[int, Any]], setting: str | None, kind: str) -> str:
    """Bits/dim by method and number of steps, at even (ET) or optimal (OT) timesteps."""
    paper = partial(published_value, "bpd", setting, kind=kind)
    return _table(rows, lambda cell: _number(cell["bits_per_dim"], 3), paper)


def images_table(found: Measured, setting: str | None) -> str:
    """Distances by method and number of steps."""
    return _table(found.images, lambda cell: _distance(cell, 2), partial(published_value, "fid", setting))


def kernel_table(found: Measured) -> str:
    """Kernel distances, times 1,000, by method and number of steps."""
    known = {
        name: {K: cell["kernel"] for K, cell in row.items() if cell.get("kernel")} for name, row in found.images.items()
    }
    return _table(known, lambda cell: f"{1000 * cell['value']:.2f} ± {1000 * cell['standard_error']:.2f}")


def _table(
    rows: Mapping[str, Mapping[int, Any]],
    words: Callable[[Mapping[str, Any]], str],
    paper: Callable[[str, int], float | None] = lambda name, K: None,
) -> str:
    """Rows against K; the paper's number stands in brackets where it has one."""
    steps = sorted({K for row in rows.values() for K in row})
    lines = [f"| | {' | '.join(f'K = {K}' for K in steps)} |", "|---|" + "---:|" * len(steps)]
    for name in (*PAPER, *OURS, *PEERS):
        row = rows.get(name, {})
        cells = [words(row[K]) + _brackets(paper(name, K)) if K in row else "" for K in steps]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _brackets(value: float | None) -> str:
    return "" if value is None else f" ({value:.2f})"


def claims(found: Measured) -> str:
    """Who is better than whom, with the differences."""
    lines = ["| | holds | difference |", "|---|---|---|"]
    for better, worse in BETTER_BITS:
        lines += _line(f"{better} has lower bits/dim than {worse}", bit_differences(found, better, worse))
    for name in ("A-DDPM", "NPR-DDPM"):
        gains = {K: row["gain"] for K, row in found.optimal.get(name, {}).items() if row["gain"]["standard_error"] > 0}
        lines += _line(
            f"{name} has lower bits/dim at optimal timesteps",
            [Difference(f"K = {K}", g["mean"], g["standard_error"]) for K, g in gains.items()],
        )
    section = found.section()
    for better, worse in BETTER_IMAGES:
        lines += _line(f"{better} draws better images than {worse}", row_differences(section, better, worse))
    return "\n".join(lines)


def bit_differences(found: Measured, better: str, worse: str) -> list[Difference]:
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


def readme_bits() -> str:
    """Bits/dim of README.md, of measurements/covariances, which has correlated pixels too."""
    columns = {}
    for model, data in DATA.items():
        for line in (MEASURED / "covariances" / f"{model}.jsonl").read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            bits = {row_of(name): value for name, value in found["bits/dim"].items()}
            columns[f"{data}, K={found['steps']}"] = bits
    rows = ("DDPM, beta", "A-DDPM", "SN-DDPM", "NPR-DDPM", "CNPR-DDPM")
    return _readme_table(rows, columns, lambda value: _number(value, 2))


def readme_images(measured: Mapping[str, Measured]) -> str:
    """Distances of README.md."""
    columns = {
        f"{DATA[model]}, {found.distance}": {name: row[PLOTTED] for name, row in found.images.items() if PLOTTED in row}
        for model, found in measured.items()
    }
    ours = ("DDPM, beta-tilde", "A-DDPM", "NPR-DDPM", "DDIM", "NPR-DDIM", "Bridge 2M")
    return _readme_table((*ours, "UniPC", "UniPC, Karras times"), columns, lambda cell: _distance(cell, 2))


def _readme_table(rows: Iterable[str], columns: Mapping[str, Mapping[str, Any]], words: Callable[[Any], str]) -> str:
    lines = [f"|method|{'|'.join(columns)}|", "|---|" + "--:|" * len(columns)]
    for name in rows:
        cells = [words(column[name]) if name in column else "" for column in columns.values()]
        lines.append(f"|{name}|{'|'.join(cells)}|")
    return "\n".join(lines)


def parts(models: Iterable[str]) -> dict[str, str]:
    """What the pages of results hold, by the name of its place."""
    made = {}
    for model in models:
        found, setting = Measured.of(model), PAPER_SETTING.get(model)
        made[f"bits of {model}"] = bits_table(found.bits, setting, "ET")
        made[f"bits of {model} at optimal timesteps"] = bits_table(found.optimal, setting, "OT")
        made[f"images of {model}"] = images_table(found, setting)
        if found.distance == FID:
            made[f"kernel distances of {model}"] = kernel_table(found)
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
    return [name for name in DATA if any((MEASURED / name).glob("*.jsonl"))]


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    measured = {model: Measured.of(model) for model in models()}
    readme = {"README bits": readme_bits(), "README images": readme_images(measured)}
    restored = {
        f"restoration of {path.stem}": restoration_tables.page_part(restoration_tables.Comparison.of(path))
        for path in (MEASURED / "restoration").glob("*.jsonl")
        if path.stem in DATA
    }
    own = parts(models())
    made = {PAGE: own, CLAIMS: own, README: readme, RESTORATION: restored}
    return {path: inserted(path.read_text("utf-8"), tables) for path, tables in made.items()}


def plot(measured: Mapping[str, Measured], path: Path) -> None:
    """For each model bits/dim against the number of steps, and the distances of images in ten steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.7 * len(measured)), layout="constrained")
    for (left, right), (model, found) in zip(
        figure.subplots(len(measured), 2, squeeze=False), measured.items(), strict=True
    ):
        _plot_bits(left, found, model)
        _plot_images(right, found, model)
        for axes in (left, right):
            axes.minorticks_off()
        open_frame(left, right)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, ncols=len(PAPER), loc="outside upper center")
    figure.savefig(path, dpi=115)


def _plot_bits(axes: Axes, found: Measured, model: str) -> None:
    shown = {name: dict(sorted(found.bits[name].items())) for name in PAPER if found.bits.get(name)}
    for name, row in shown.items():
        values = [cell["bits_per_dim"]["mean"] for cell in row.values()]
        axes.plot(list(row), values, color=colour_of(name), marker="o", markersize=3, label=name)
    steps = sorted({K for row in shown.values() for K in row})
    least = min(cell["bits_per_dim"]["mean"] for row in shown.values() for cell in row.values())
    ticks = [bits for bits in (3, 4, 5, 6, 8, 10) if bits > 0.9 * least]
    axes.set(xscale="log", yscale="log", xlabel="steps", xticks=steps, xticklabels=[str(K) for K in steps])
    axes.set(title=f"{model}: bits/dim", ylim=(0.95 * least, 13))
    axes.set(yticks=ticks, yticklabels=[str(bits) for bits in ticks])


def _plot_images(axes: Axes, found: Measured, model: str) -> None:
    shown = {name: row[PLOTTED] for name, row in found.images.items() if PLOTTED in row and name != "DDPM, beta"}
    best_last = sorted(shown, key=lambda name: -float(distance_entry(shown[name]).value or 0))
    for place, name in enumerate(best_last):
        entry = distance_entry(shown[name])
        axes.errorbar(entry.value, place, xerr=entry.error, color=colour_of(name), marker="o", capsize=3)
    axes.set(title=f"{model}: {found.distance} in {PLOTTED} steps", yticks=range(len(best_last)), yticklabels=best_last)
    left_out = found.images.get("DDPM, beta", {}).get(PLOTTED)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"DDPM, beta is left out: {_distance(left_out, 2)}" if left_out else "")


def main() -> None:
    """Write the pages' parts and the plot."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    plot({model: Measured.of(model) for model in models()}, PLOT)


if __name__ == "__main__":
    main()
