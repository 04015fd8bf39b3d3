"""`optcov report`: one HTML page that needs no network, from tables and a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.console import announce, check_seed, command_line, finish, print_json
from optcov.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optcov.bundle import Bundle
    from optcov.data import ImageSet
    from optcov.experiments.report.page import PageSection
    from optcov.experiments.tables import TableResult


def command(
    tables: list[Path] = typer.Argument(None, help="Directories that optcov table wrote."),
    bundle: str | None = typer.Option(None, help="A bundle whose samples and variances are shown."),
    data: str | None = typer.Option(
        None, help="Held-out images for the bundle. By default those that come with the model."
    ),
    out: Path = typer.Option(Path("out/report.html"), help="The page."),
    figures: str = typer.Option("", help="Also show the paper's figures of a setting, such as 'CIFAR10 (LS)'."),
    title: str = typer.Option("", help="Heading of the page."),
    quick: bool = typer.Option(False, "--quick", help="Draw fewer samples and maps."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of the bundle's samples and maps."),
    json: bool = typer.Option(False, "--json", help="Print the contents of the page as JSON."),
) -> None:
    """Put tables, plots, samples, variance maps, and variances against errors on one self-contained HTML page."""
    from optcov import bundle as bundles
    from optcov import storage
    from optcov.experiments.report.page import write_page
    from optcov.experiments.report.page_sections import (
        bundle_sections,
        noted,
        of_other_bundles,
        paper_figures,
        provenance_section,
        read_tables,
        table_sections,
    )
    from optcov.experiments.report.size import QUICK, ReportSize
    from optcov.experiments.timing import machine

    if not tables and bundle is None:
        raise ValueError("there is nothing to report; give directories of tables, or --bundle, or both")
    if figures and bundle is None:
        raise ValueError("figures are drawn by a bundle; name it by --bundle")
    results = read_tables(tables or [])
    others: list[TableResult] = []
    parts: list[tuple[str, Callable[[], PageSection]]] = []
    drawn: Iterator[PageSection] = iter(())
    if bundle is not None:
        model = bundles.load(bundle)
        others = of_other_bundles(results, model)
        results = [noted(result, model) if result in others else result for result in results]
        images = _images(data, model)
        parts = bundle_sections(model, images, QUICK if quick else ReportSize(), seed)
        drawn = paper_figures(model, figures, images, seed=seed) if figures else drawn
    storage.require_writable(out)
    announce(f"puts {len(results)} tables{f' and what {bundle} draws' if bundle else ''} on one page, {out}")
    if others:
        announce(
            f"the page says of {', '.join(table.name for table in others)}: measured on another bundle than {bundle}"
        )
    sections = list(table_sections(results))
    if parts:
        sections += track((make() for _, make in parts), len(parts), "sections of the bundle", "sections")
    sections += drawn
    sections.append(provenance_section(results, {"command": command_line(), **machine()}))
    heading = title or f"optcov: {bundle or ', '.join(str(directory) for directory in tables)}"
    write_page(out, heading, sections)
    if json:
        print_json({"page": str(out), "sections": [section.title for section in sections]})
        return
    finish(out, "python", "-m", "webbrowser", str(out))


def _images(data: str | None, model: Bundle) -> ImageSet | None:
    from optcov.bundle import BundleError
    from optcov.experiments.tables import TableImages

    try:
        return TableImages.load(data, model.name, model.image_shape[0]).test
    except BundleError:
        return None  # no images come with the model: show its samples alone
