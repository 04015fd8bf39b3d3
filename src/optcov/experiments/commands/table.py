"""`optcov table`: a table of the paper for any bundle and data, with the paper's numbers beside ours.

Under `accelerate launch -m optcov table ...`, or in several commands with one --out, processes share the cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from optcov.console import (
    announce,
    check_out,
    check_seed,
    command_line,
    errors,
    finish,
    names,
    numbers,
    output,
    print_json,
    print_table,
    resumable,
    was_given,
)
from optcov.progress import fresh, track
from optcov.text_table import counted

if TYPE_CHECKING:
    import torch

    from optcov.bundle import Bundle
    from optcov.experiments.tables import TableImages, TableResult, TableRun, TableSize
    from optcov.metrics import Extractor

NAMES = "fid, timesteps, bpd, cost, iddpm, repeats, normalised or peers"
TAKEN_BY = {  # options that change nothing in other tables
    "--method": ("fid", "peers", "bpd"),
    "--steps": ("fid", "peers", "bpd", "iddpm", "normalised"),
    "--samples": ("fid", "peers", "timesteps", "normalised"),
    "--features": ("fid", "peers", "timesteps", "normalised"),
    "--reference": ("fid", "peers", "timesteps", "normalised"),
    "--images": ("bpd", "iddpm", "repeats", "fid --optimal"),
    "--train-images": ("bpd", "iddpm", "fid --optimal"),
    "--times": ("bpd", "iddpm", "repeats", "fid --optimal"),
    "--data": ("fid", "peers", "timesteps", "normalised", "bpd", "iddpm", "repeats"),
    "--paper": ("fid", "peers", "timesteps", "normalised", "bpd", "cost", "repeats"),
    "--optimal": ("fid",),
    "--target": ("timesteps",),
}
FIRST_SCREEN = ("bundle", "data", "out", "quick", "full", "schedules", "steps", "samples", "images", "json")


def command(
    context: typer.Context,
    name: str = typer.Argument(help=f"Which table: {NAMES}."),
    bundle: str = typer.Option("fashion", help="A bundle: an embedded model's name, or a directory."),
    data: str | None = typer.Option(None, help="Images with a train and a test split. By default those of the model."),
    out: Path = typer.Option(
        Path("out/tables"), callback=check_out, help="Directory of the tables and their cells, shared by all tables."
    ),
    quick: bool = typer.Option(False, "--quick", help="A small version: minutes on two cores."),
    full: bool = typer.Option(False, "--full", help="As many images and steps as in the paper."),
    schedules: str = typer.Option(
        "", help="Any of linear, cosine, vp_sde and own, as in linear,cosine. The default depends on the bundle."
    ),
    features: str = typer.Option(
        "",
        help="Feature extractor: fashion, lite0, inception, inception:pytorch-fid or inception:FILE. "
        "By default by the images' shape.",
    ),
    reference: str | None = typer.Option(None, help="What samples are compared with: images or statistics (.npz)."),
    paper: str | None = typer.Option(None, help="The paper's setting to put beside ours, such as 'CelebA 64x64'."),
    method: list[str] = typer.Option([], help="fid, peers, bpd: only this row, such as SN-DDIM; may be repeated."),
    steps: str = typer.Option(
        "", help="fid, peers, bpd, iddpm, normalised: only these numbers of steps K, as in 10,25."
    ),
    samples: int | None = typer.Option(None, min=4, help="Images drawn for a distance."),
    images: int | None = typer.Option(None, min=1, help="Test images scored for bits/dim."),
    train_images: int | None = typer.Option(None, min=1, help="Training images that choose the trajectories."),
    times: int | None = typer.Option(
        None, min=2, help="Times of the sweep for bits/dim. By default all, or 100 with --quick."
    ),
    optimal: bool = typer.Option(False, "--optimal", help="fid: also along the optimal trajectories of bpd."),
    target: float | None = typer.Option(
        None, help="timesteps: the distance to reach. By default A-DDIM's in 25 steps (--quick: 10)."
    ),
    seed: int = typer.Option(
        0, callback=check_seed, help="Seed of all noise. The table repeats also takes the next ones."
    ),
    batch_size: int = typer.Option(64, min=1, help="Images per network evaluation; does not change the result."),
    json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:
    """Make a table of the paper with a bundle, with the paper's numbers beside ours."""
    from dataclasses import replace

    from optcov.experiments.tables import TABLES, Evaluation, table_run, write_table
    from optcov.experiments.tables.published import check_setting
    from optcov.experiments.tables.runs import made_by
    from optcov.processes import this_process

    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; choose one of {', '.join(TABLES)}")
    _check_options({name, f"{name} --optimal" if optimal else name}, context)
    state = this_process()
    model, table_images, extractor = _subject(name, bundle, data, features, state.device)
    evaluation = Evaluation(
        model,
        table_images,
        extractor,
        _size(quick, full, samples=samples, images=images, train_images=train_images, times=times),
        schedules=names(schedules) or None,
        reference=reference,
        paper=None if paper is None else check_setting(paper),
        methods=method or None,
        steps=numbers(steps, "--steps", "5,10,25") if steps else None,
        seed=seed,
        batch_size=batch_size,
    )
    run = table_run(name, evaluation, out, optimal=optimal, target=target)
    announce(
        f"table {name} of {model.name} on {table_images.name}{_fewer(table_images, images, train_images)}, "
        f"{evaluation.size.name} size, schedules "
        f"{', '.join(evaluation.schedules)}: {run.total:,.0f} network evaluations, less what is kept in {out}"
    )
    with resumable(out):
        _drain(run, name, quiet=not state.is_main_process)
    if not state.is_main_process:
        return
    result = replace(run.table, made_by=made_by(command_line(), evaluation))
    paths = write_table(result, out)
    if json:
        print_json(result.to_json())
        return
    show(result)
    images_used = ["--data", data] if data else []
    finish(paths[0], "optcov", "report", str(out), "--bundle", bundle, *images_used)


def _subject(
    table: str, bundle: str, data: str | None, features: str, device: torch.device
) -> tuple[Bundle, TableImages, Extractor | None]:
    """What is measured, on what images, by which features; those of clothes serve images of their shape."""
    from optcov import bundle as bundles
    from optcov.experiments.tables import TableImages
    from optcov.experiments.tables.runs import WITHOUT_SAMPLES
    from optcov.metrics import find_extractor

    model = bundles.load(bundle)
    model.network.to(device)
    default = "fashion" if model.image_shape == (1, 28, 28) else "lite0"
    extractor = None if table in WITHOUT_SAMPLES else find_extractor(features or default)
    images = (
        TableImages.blank(model.image_shape)
        if table == "cost"
        else TableImages.load(data, model.name, model.image_shape[0])
    )
    return model, images, extractor


def _fewer(found: TableImages, images: int | None, train_images: int | None) -> str:
    """What there are fewer of than were asked for."""
    sets = ((found.test, images, "test images"), (found.train, train_images, "training images"))
    told = [counted(len(one), asked, what) for one, asked, what in sets if asked is not None and asked > len(one)]
    return f", {' and '.join(told)}" if told else ""


def _check_options(tables: set[str], context: typer.Context) -> None:
    """Refuse an option that would change nothing in a table, which may go by several names."""
    for option, takers in TAKEN_BY.items():
        if was_given(context, option) and not tables & set(takers):
            raise ValueError(f"table {min(tables)} does not take {option}; leave it out (for {', '.join(takers)})")


def _size(quick: bool, full: bool, **changes: int | None) -> TableSize:
    """One of the three sizes, with what was asked for in its place."""
    from dataclasses import replace

    from optcov.experiments.tables import SIZES

    if quick and full:
        raise ValueError("--quick and --full exclude each other; leave both out for the middle size")
    chosen = SIZES["quick" if quick else "full" if full else "middle"]
    wanted: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    return replace(chosen, **wanted)


def show(result: TableResult) -> None:
    """Print a finished table and what it says about the paper's claims."""
    from rich.text import Text

    from optcov.experiments.tables.render import entry_text, section_title

    for section in result.sections:
        rows = [
            (row.name, *(Text(entry_text(e, section), style="bold" if e.best else "") for e in row.entries))
            for row in section.rows
        ]
        print_table(f"{result.title}: {section_title(section)}", ("", *section.columns), rows)
    for claim in result.claims:
        output.print(f"{claim.verdict}: {claim.statement} ({claim.evidence})", highlight=False, markup=False)
    for note in result.notes:
        output.print(note, highlight=False, markup=False)


def _drain(run: TableRun[TableResult], name: str, quiet: bool) -> None:
    if quiet:
        for _ in run:
            pass
        return
    label = ""
    for progress in track(run, round(run.total), f"table {name}", "evaluations", fresh(lambda p: p.done)):
        if progress.label != label:
            label = progress.label
            errors.print(label, highlight=False, markup=False)
