"""Tables by name: the run of each, and what made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optcov.experiments.tables.cells import TABLES, CellStore, Plan, TableRun
from optcov.experiments.tables.cost import cost_plan
from optcov.experiments.tables.distances import fid_cells, fid_plan, fid_work, peers_cells, peers_plan
from optcov.experiments.tables.evaluation import Evaluation
from optcov.experiments.tables.likelihoods import bpd_cells, bpd_plan, iddpm_plan, repeats_cells, repeats_plan
from optcov.experiments.tables.normalised import normalised_plan, normalised_work
from optcov.experiments.tables.result import TableResult
from optcov.experiments.tables.timesteps import timesteps_plan, timesteps_work
from optcov.experiments.timing import machine

WITHOUT_SAMPLES = ("bpd", "cost", "iddpm", "repeats")


def table_run(
    name: str, evaluation: Evaluation, directory: Path, *, optimal: bool = False, target: float | None = None
) -> TableRun[TableResult]:
    """A run of a table in a directory, which other tables may share; iterate over it, then take its table.

    optimal: fid also along optimal trajectories. target: the distance of timesteps.
    """
    plan, work = _plan(name, evaluation, optimal, target)
    return TableRun(plan, work, CellStore(directory, name), evaluation.compute)


def _plan(name: str, evaluation: Evaluation, optimal: bool, target: float | None) -> tuple[Plan[TableResult], float]:
    if name == "fid":
        cells = fid_cells(evaluation)
        return fid_plan(evaluation, cells, optimal), fid_work(evaluation, cells, optimal)
    if name == "peers":
        cells = peers_cells(evaluation)
        return peers_plan(evaluation, cells), sum(cell.work for cell in cells.values())
    if name in ("bpd", "iddpm"):
        sweeps = bpd_cells(evaluation)
        plan = bpd_plan if name == "bpd" else iddpm_plan
        return plan(evaluation, sweeps), sum(cell.work for cell in sweeps.values())
    if name == "repeats":
        repeats = repeats_cells(evaluation)
        return repeats_plan(evaluation, repeats), sum(cell.work for cell in repeats.values())
    if name == "cost":
        cell = evaluation.cost_cell()
        return cost_plan(cell, evaluation.paper_setting(evaluation.schedules[0])), cell.work
    if name == "timesteps":
        return timesteps_plan(evaluation, target), timesteps_work(evaluation)
    if name == "normalised":
        return normalised_plan(evaluation), normalised_work(evaluation)
    raise ValueError(f"unknown table {name!r}; choose one of {', '.join(TABLES)}")


def made_by(command: str, evaluation: Evaluation) -> dict[str, Any]:
    """What a reader needs to make the table again."""
    return {
        "command": command,
        "size": evaluation.size.name,
        "bundle": evaluation.bundle.name,
        "model": evaluation.identity,
        "images": evaluation.images.name,
        "seed": evaluation.seed,
        **machine(),
    }
