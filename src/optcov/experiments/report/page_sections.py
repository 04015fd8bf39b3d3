"""The sections of a report: tables from their run directories, and what a bundle shows of itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov import storage
from optcov.bundle import Bundle, StoredTrajectory, schedule_spec
from optcov.bundle.pictures import Drawn, clean_deviation, compare, draw_comparison, draw_deviations, draw_grid
from optcov.canvas import png, times_figure
from optcov.covariances import find_covariance
from optcov.data import ImageSet
from optcov.experiments.report.page import PageSection, made_by_body, picture, table_body
from optcov.experiments.report.page_figures import (
    VarianceAndError,
    against_steps,
    chosen_times,
    lengths_of,
    variance_against_error,
    variance_curves,
)
from optcov.experiments.report.size import ReportSize
from optcov.experiments.tables import TABLES, TableResult, published
from optcov.experiments.tables.distances import DISCRETE
from optcov.experiments.tables.evaluation import model_identity, serves_all_schedules
from optcov.experiments.tables.published import check_setting
from optcov.experiments.tables.scoring import rows_by_covariance
from optcov.noise import batch_noise
from optcov.trajectory import Trajectory


def read_tables(directories: Sequence[Path]) -> list[TableResult]:
    """Every table that lies in the directories, in the paper's order within each."""
    found = []
    for directory in directories:
        if directory.is_file():
            raise ValueError(f"{directory} is a file; give the directory that optcov table wrote, {directory.parent}")
        here = [directory / f"{name}.json" for name in TABLES if (directory / f"{name}.json").is_file()]
        if not here:
            raise ValueError(f"{directory} holds no table; make one by optcov table NAME --out {directory}")
        found += [_read_table(path) for path in here]
    return found


def of_other_bundles(tables: Sequence[TableResult], bundle: Bundle) -> list[TableResult]:
    """Those tables that were measured on another bundle than this one, whatever its name; unknown ones do not count."""
    here = model_identity(bundle)
    return [table for table in tables if table.made_by.get("model", here) != here]


def noted(table: TableResult, bundle: Bundle) -> TableResult:
    """A table of another bundle, which says so."""
    named = table.made_by.get("bundle")
    other = f"the bundle {named}" if named != bundle.name else f"an earlier {named}"
    note = f"These numbers belong to {other}, not to {bundle.name} as it is shown on this page."
    return replace(table, notes=(*table.notes, note))


def table_sections(tables: Sequence[TableResult]) -> Iterator[PageSection]:
    """A section per table with its plots, then the chosen times."""
    for result in tables:
        plots = [
            picture(
                against_steps(section, result.quantity),
                f"{result.quantity} against K: {section.heading}; what is far above the others leaves the plot",
            )
            for section in result.sections
            if len(lengths_of(section)) > 1 and any(e.value is not None for row in section.rows for e in row.entries)
        ]
        yield PageSection(result.title, table_body(result) + "".join(plots))
        chosen = dict(chosen_times(result))
        if chosen:
            lengths = sorted({K for times in chosen.values() for K in times if K <= 100})
            pictures = []
            for K in lengths:
                shown = {name: times[K] for name, times in chosen.items() if K in times}
                pictures.append(picture(png(times_figure(shown, f"K = {K}")), f"The times of the least bound, K = {K}"))
            yield PageSection("Optimal trajectories", "".join(pictures))


def bundle_sections(
    bundle: Bundle, images: ImageSet | None, size: ReportSize, seed: int = 0
) -> list[tuple[str, Callable[[], PageSection]]]:
    """What a bundle shows, each under its title and made when called; without images only samples."""
    if images is not None and images.shape != tuple(bundle.image_shape):
        raise ValueError(
            f"{images.name} has images of shape {images.shape}, but {bundle.name} needs {bundle.image_shape}"
        )
    model = bundle.with_schedule("linear") if serves_all_schedules(bundle.schedule) else bundle
    size = size.within(model.schedule)
    found: list[tuple[str, Callable[[], PageSection]]] = [("samples", lambda: _samples(model, size, seed))]
    if images is not None:
        found.append(("variance maps", lambda: _maps(model, images, size, seed)))
        found.append(("variances", lambda: _variances(model, images, size, seed)))
        if _with_a_head(model):
            found.append(("variance against error", lambda: _variance_against_error(model, images, size, seed)))
    if bundle.trajectories:
        found.append(("trajectories", lambda: _stored(bundle)))
    return found


def paper_figures(
    bundle: Bundle, setting: str, images: ImageSet | None = None, count: int = 16, seed: int = 0
) -> Iterator[PageSection]:
    """The paper's figures of samples of one of its settings, by this bundle: the same methods and numbers of steps.

    images: for the panels that show the data set. What cannot be drawn is refused at once.
    """
    content = published("settings")
    schedule = content["settings"][check_setting(setting)]["schedule"]
    discrete = serves_all_schedules(bundle.schedule) and schedule != "vp_sde"
    model = bundle.with_schedule(schedule) if discrete else bundle
    figures = [figure for figure in content["figures"] if figure["setting"] == setting]
    panels = [[compare(model, [p["method"]], [p["steps"]], count, seed) for p in f["panels"]] for f in figures]
    shown = [images.images[:count] if f["data"] and images is not None else None for f in figures]
    title, columns = f"The paper's figure of {setting}, by {bundle.name}", round(count**0.5)
    return (PageSection(title, _panels(data, cells, columns)) for data, cells in zip(shown, panels, strict=True))


def _panels(data: Tensor | None, drawn: Sequence[Iterator[Drawn]], columns: int) -> str:
    """Pictures beside each other: of the data set, if there is one, and of what methods draw."""
    body = []
    if data is not None:
        body.append(_drawn(partial(_draw_panel, data, columns), "Samples from the data set"))
    for (cell,) in drawn:
        body.append(_drawn(partial(_draw_panel, cell.images, columns), f"{cell.method}, K = {cell.steps}"))
    return f"<div class=panels>{''.join(body)}</div>"


def provenance_section(tables: Sequence[TableResult], report: dict[str, Any]) -> PageSection:
    """Commands and versions of everything on the page."""
    records = [(f"table {result.name}: {result.title}", result.made_by) for result in tables if result.made_by]
    return PageSection("Commands and versions", made_by_body([*records, ("this page", report)]))


def _read_table(path: Path) -> TableResult:
    content = storage.read_json(path)
    try:
        return TableResult.from_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _samples(model: Bundle, size: ReportSize, seed: int) -> PageSection:
    methods = [name for names in DISCRETE.values() for name in names if _possible(model, name)]
    cells = list(compare(model, methods, size.grid_steps, size.grid_images, seed))
    caption = f"{model.name}: every method from the same noise"
    return PageSection("Samples", _drawn(lambda path: draw_comparison(cells, path, ""), caption))


def _maps(model: Bundle, images: ImageSet, size: ReportSize, seed: int) -> PageSection:
    shown = images.select(slice(0, size.map_images))
    times = Trajectory.even(model.schedule, size.map_times + 2).times[1:-1]
    forward = model.reverse_process("DDPM, beta-tilde").forward
    noise = batch_noise(seed, range(len(shown)), 0, shown.shape)
    body = []
    for method in _with_a_head(model).values():
        for t in times:
            deviations = clean_deviation(model.reverse_process(method), forward.diffuse(shown.x_0(), t, noise), t)
            caption = f"{method}: images, and the standard deviation of x_0 given their noisy version at t = {t:g}"
            body.append(_drawn(partial(_draw_map, shown, deviations), caption))
    return PageSection("Variance maps", "".join(body) or "<p>The bundle has no head that knows pixels apart.</p>")


def _draw_panel(images: Tensor, columns: int, path: Path) -> None:
    draw_grid(images, path, "", columns)  # the page has the caption


def _draw_map(images: ImageSet, deviations: Tensor, path: Path) -> None:
    draw_deviations(images.images, deviations, path, "")


@torch.no_grad()
def _variances(model: Bundle, images: ImageSet, size: ReportSize, seed: int) -> PageSection:
    processes = {name: model.reverse_process(method) for name, method in _stepping(model).items()}
    first = processes["beta_tilde"]
    x_0 = images.x_0(slice(0, size.curve_images))
    trajectory = Trajectory.even(model.schedule, size.curve_steps)
    curves: dict[str, list[float]] = {name: [] for name in processes}
    times = []
    for t, s in trajectory.descending():
        if s == 0:
            continue
        noise = batch_noise(seed, range(len(x_0)), model.schedule.stream(t), x_0.shape[1:])
        x_t = first.forward.diffuse(x_0, t, noise)
        prediction = first.predict(x_t, t)
        times.append(t)
        for name, process in processes.items():
            curves[name].append(float(process.step_from(prediction, s).variance.double().mean()))
    caption = (
        f"Mean variance of the step from t to the next of {size.curve_steps} even times, {len(x_0)} images, DDPM's "
        f"forward process; dotted: beta-tilde and beta, between which the optimal one lies if the mean is perfect"
    )
    return PageSection("Variance against time", picture(variance_curves(times, curves), caption))


@torch.no_grad()
def _variance_against_error(model: Bundle, images: ImageSet, size: ReportSize, seed: int) -> PageSection:
    """By the variances that steps are made of, clamped as there: a head may be right and its variance not."""
    processes = {name: model.reverse_process(method) for name, method in _with_a_head(model).items()}
    first = next(iter(processes.values()))
    x_0 = images.x_0(slice(0, size.error_images))
    times = Trajectory.even(model.schedule, size.error_times).times
    found: dict[str, list[VarianceAndError]] = {name: [] for name in processes}
    for number, t in enumerate(times):
        x_t = first.forward.diffuse(x_0, t, batch_noise(seed, range(len(x_0)), number, x_0.shape[1:]))
        prediction = first.predict(x_t, t)
        for name, process in processes.items():
            posterior = process.posterior_from(prediction)
            squared_error = (x_0 - posterior.mean).square()
            found[name].append(
                VarianceAndError.of(posterior.variance.flatten(1).mean(1), squared_error.flatten(1).mean(1))
            )
    caption = (
        f"Variance of x_0 that steps are made of, and the squared error of its mean that was measured, in data units; "
        f"{len(x_0)} held-out images at {len(times)} times (optcov info shows another quantity, a head's calibration)"
    )
    return PageSection("Variance against error", picture(variance_against_error(times, found), caption))


def _stored(bundle: Bundle) -> PageSection:
    chosen: dict[tuple[str, str], list[StoredTrajectory]] = {}
    for entry in bundle.trajectories:
        chosen.setdefault((entry.method, entry.schedule.digest()), []).append(entry)
    pictures = []
    for entries in chosen.values():
        schedule = entries[0].schedule
        times = f"{schedule.grid_size} times" if schedule.discrete else "real times"
        name = f"{entries[0].method}, {schedule_spec(schedule)['kind']}, {times}"
        by_length = {len(entry.trajectory): entry.trajectory.times for entry in entries}
        usual = [K for K in (5, 10, 25, 50, 100) if K in by_length] or sorted(by_length)[-5:]
        shown = {f"K = {K}": by_length[K] for K in usual}
        pictures.append(picture(png(times_figure(shown, name)), f"Optimal times stored in the bundle: {name}"))
    return PageSection("Stored trajectories", "".join(pictures))


def _stepping(model: Bundle) -> dict[str, str]:
    """The covariances that a bundle can step by, each with its method of DDPM's forward process."""
    return {covariance: row for covariance, row in rows_by_covariance().items() if _possible(model, row)}


def _with_a_head(model: Bundle) -> dict[str, str]:
    """Those of them that know pixels of x_0 apart."""
    kinds = {name: find_covariance(name) for name in _stepping(model)}
    return {name: method for name, method in _stepping(model).items() if kinds[name].head and kinds[name].has_posterior}


def _possible(model: Bundle, method: str) -> bool:
    try:
        model.reverse_process(method)
    except ValueError:
        return False  # it lacks the head or the numbers per time, or only sweeps know the row
    return True


def _drawn(draw: Callable[[Path], None], caption: str) -> str:
    """A picture by a function that writes files."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "picture.png"
        draw(path)
        return picture(path.read_bytes(), caption)
