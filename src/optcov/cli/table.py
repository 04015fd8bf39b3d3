"""`optcov table`: a table of the paper on any bundle and data, ours beside the paper's.

Under `accelerate launch -m optcov table ...`, or in several commands with one --out, processes share the cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.cli.console import command_line, errors, finish, output, print_json, print_table, resumable, track

if TYPE_CHECKING:
    from optcov.tables import Progress, TableResult, TableRun

NAMES = "fid, timesteps, bpd, cost, iddpm, repeats, normalised or peers"


def command(
    name: str = typer.Argument(help=f"Which table: {NAMES}."),
    bundle: str = typer.Option("fashion", help="A bundle: an embedded model's name, or a directory."),
    data: str | None = typer.Option(None, help="Images with a train and a test split; default those of the model."),
    out: Path = typer.Option(Path("out/tables"), help="Directory of the tables and their cells, shared by all tables."),
    quick: bool = typer.Option(False, "--quick", help="Minutes on two cores."),
    full: bool = typer.Option(False, "--full", help="As many images and steps as in the paper."),
    schedules: str = typer.Option("", help="linear, cosine, vp_sde or own, by commas; default by bundle and size."),
    features: str = typer.Option("", help="Feature extractor: fashion, lite0 or inception:FILE; default by shape."),
    reference: str | None = typer.Option(None, help="What samples are compared with: images or statistics (.npz)."),
    paper: str | None = typer.Option(None, help="The paper's setting to put beside ours, such as 'CelebA 64x64'."),
    method: list[str] = typer.Option([], help="fid, peers, bpd: only this row, such as SN-DDIM; may be repeated."),
    steps: str = typer.Option("", help="fid, peers, bpd, normalised: only these numbers of steps K, by commas."),
    samples: int | None = typer.Option(None, min=4, help="Draw so many images for a distance."),
    images: int | None = typer.Option(None, min=1, help="Score so many test images for bits/dim."),
    train_images: int | None = typer.Option(None, min=1, help="Choose trajectories on so many training images."),
    times: int | None = typer.Option(None, min=2, help="Sweep over so many times for bits/dim; default all or 100."),
    optimal: bool = typer.Option(False, "--optimal", help="fid: also along the optimal trajectories of bpd."),
    target: float | None = typer.Option(None, help="timesteps: the distance to reach; default A-DDIM's in 25 steps."),
    seed: int = typer.Option(0, help="Seed of all noise."),
    batch_size: int = typer.Option(64, min=1, help="Images per network evaluation; does not change the result."),
    json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:
    """Measure a table of the paper: ours beside the paper's, resumable, as Markdown, CSV, LaTeX and JSON."""
    from dataclasses import replace

    from accelerate import PartialState

    from optcov import bundle as bundles
    from optcov.metrics import find_extractor
    from optcov.tables import SIZES, TABLES, Evaluation, TableImages, table_run, write_table
    from optcov.tables.published import check_setting
    from optcov.tables.runs import WITHOUT_SAMPLES, made_by

    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; choose one of {', '.join(TABLES)}")
    if quick and full:
        raise ValueError("--quick and --full exclude each other; leave both out for the middle size")
    size = SIZES["quick" if quick else "full" if full else "middle"]
    size = replace(
        size,
        samples=samples or size.samples,
        images=images or size.images,
        train_images=train_images or size.train_images,
        times=times or size.times,
    )
    state = PartialState()
    first = state.is_main_process
    model = bundles.load(bundle)
    model.network.to(state.device)
    default = "fashion" if model.image_shape == (1, 28, 28) else "lite0"
    evaluation = Evaluation(
        model,
        TableImages.load(data, model.name),
        None if name in WITHOUT_SAMPLES else find_extractor(features or default),
        size,
        schedules=[part.strip() for part in schedules.split(",")] if schedules else None,
        reference=reference,
        paper=None if paper is None else check_setting(paper),
        methods=method or None,
        steps=_numbers(steps) or None,
        seed=seed,
        batch_size=batch_size,
    )
    run = table_run(name, evaluation, out, optimal=optimal, target=target)
    with resumable(out):
        _drain(run, name, quiet=not first)
    if not first:
        return
    result = replace(run.table, made_by=made_by(command_line(), evaluation))
    paths = write_table(result, out)
    if json:
        print_json(result.to_json())
        return
    show(result)
    finish(paths[0], f"optcov report {out} --bundle {bundle}")


def show(result: TableResult) -> None:
    """Print a finished table and what it says about the paper's claims."""
    from optcov.tables.render import plain, section_title

    for section in result.sections:
        rows = [(row.name, *(_bold(plain(e, section), e.best) for e in row.entries)) for row in section.rows]
        print_table(f"{result.title}: {section_title(section)}", ("", *section.columns), rows)
    ticks = {True: "holds", False: "does not hold", None: "cannot be told"}
    for claim in result.claims:
        output.print(f"{ticks[claim.holds]}: {claim.statement} ({claim.evidence})", highlight=False, markup=False)
    for note in result.notes:
        output.print(note, highlight=False, markup=False)


def _drain(run: TableRun[TableResult], name: str, quiet: bool) -> None:
    if quiet:
        for _ in run:
            pass
        return
    before = 0.0

    def fresh(progress: Progress) -> int:
        nonlocal before
        step, before = progress.done - before, progress.done
        return round(step)

    label = ""
    for progress in track(run, round(run.total), f"table {name}", "evaluations", fresh):
        if progress.label != label:
            label = progress.label
            errors.print(label, highlight=False)


def _bold(text: str, best: bool) -> str:
    return f"[bold]{text}[/bold]" if best else text


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 5,10,25") from error
