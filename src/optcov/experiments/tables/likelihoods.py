"""The tables of likelihoods from their cells: bpd (tab:bpd), iddpm (tab:improved_ddpm), repeats (tab:ll_var)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from optcov.covariances import clamped_in_words, find_covariance
from optcov.experiments.tables.cells import Cell, Plan, Result, results_of
from optcov.experiments.tables.claims import Difference, judge
from optcov.experiments.tables.evaluation import Evaluation
from optcov.experiments.tables.published import published, published_value
from optcov.experiments.tables.result import Claim, Entry, Row, Section, TableResult
from optcov.experiments.tables.scoring import row_of, rows_by_covariance

REPEATED = ("analytic", "npr")


def bpd_cells(evaluation: Evaluation) -> dict[str, Cell]:
    """One cell per discrete schedule; the paper scores no other."""
    names = evaluation.discrete_schedules or list(evaluation.schedules)
    return {schedule: evaluation.likelihood_cell(schedule) for schedule in names}


def bpd_plan(evaluation: Evaluation, cells: Mapping[str, Cell]) -> Plan[TableResult]:
    """Bits/dim by even (ET) and optimal (OT) trajectories."""
    results = yield from _chosen(evaluation, cells)
    sections = [_section(evaluation, schedule, result["rows"]) for schedule, result in results.items()]
    claims = _claims(results, {schedule: int(cell.settings["times"]) for schedule, cell in cells.items()})
    return TableResult(
        "bpd",
        f"Upper bound on the negative log-likelihood, {evaluation.bundle.name}",
        "bits/dim",
        tuple(sections),
        _notes(evaluation, cells) + _clamp_notes(results),
        tuple(claims),
    )


def iddpm_plan(evaluation: Evaluation, cells: Mapping[str, Cell]) -> Plan[TableResult]:
    """The learned range of Improved DDPM beside NPR, along even trajectories."""
    schedule = next(iter(cells))
    reason = evaluation.obstacle(schedule, "Improved DDPM") or evaluation.obstacle(schedule, "NPR-DDPM")
    if reason:
        raise ValueError(reason)
    results = yield from _chosen(evaluation, cells)
    sections = []
    for schedule, result in results.items():
        rows = [row for row in result["rows"] if row["kind"] == "ET" and row["covariance"] in ("range", "npr")]
        sections.append(_section(evaluation, schedule, rows, "iddpm", "ImageNet 64x64"))
    statement = "NPR-DDPM needs fewer bits/dim than Improved DDPM with few steps"
    few = [d for d in _to_npr(results, "range", "ET") if d[0] <= 100]
    claims = (judge(statement, [difference for _, difference in few]),)
    title = f"Improved DDPM beside NPR-DDPM, even trajectories, {evaluation.bundle.name}"
    return TableResult("iddpm", title, "bits/dim", tuple(sections), _notes(evaluation, cells, chosen=False), claims)


def repeats_cells(evaluation: Evaluation) -> dict[tuple[str, int], Cell]:
    """Several seeds per discrete schedule, each with its own test images and noise."""
    names = evaluation.discrete_schedules or list(evaluation.schedules)
    seeds = range(evaluation.seed + 1, evaluation.seed + 1 + evaluation.size.repeats)
    return {(name, seed): evaluation.likelihood_cell(name, seed, choose=False) for name in names for seed in seeds}


def repeats_plan(evaluation: Evaluation, cells: Mapping[tuple[str, int], Cell]) -> Plan[TableResult]:
    """Mean and standard deviation over seeds at full timesteps."""
    results = yield from results_of(cells)
    sections, claims = [], []
    for schedule in dict.fromkeys(name for name, _ in cells):
        runs = [result["rows"] for (name, _), result in results.items() if name == schedule]
        values = {covariance: [_bits(rows, covariance) for rows in runs] for covariance in REPEATED}
        K, setting = int(runs[0][0]["K"]), evaluation.paper_setting(schedule)
        rows = tuple(_repeated_row(covariance, values[covariance], K, setting) for covariance in REPEATED)
        sections.append(Section(schedule, (f"K = {K}",), rows, setting, decimals=5).with_best())
        full = evaluation.bundle_on(schedule).schedule.grid_size == K
        claims.append(_repeated_claim(values["npr"], values["analytic"], f"{schedule}, K = {K}", K, full))
    theirs = published("repeats")
    noted = (
        f"Mean and standard deviation over {evaluation.size.repeats} seeds, which choose images and noise "
        f"(the paper: {theirs['repeats']} seeds, {theirs['images']:,} images).",
        *_notes(evaluation, cells, None),
    )
    title = f"Likelihood over seeds, {evaluation.bundle.name}"
    return TableResult("repeats", title, "bits/dim", tuple(sections), noted, tuple(claims))


def _repeated_row(covariance: str, values: Sequence[float | None], K: int, setting: str | None) -> Row:
    """Mean over seeds, and standard deviation in place of an error, as in the paper."""
    name, known = row_of(covariance), [value for value in values if value is not None]
    paper = published_value("repeats", setting, name, K)
    in_full = None if paper is None else _with_deviation(str(setting), name)
    if not known:
        return Row(name, (Entry(text="-", paper=paper, paper_text=in_full),))
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Row(name, (Entry(statistics.fmean(known), spread, paper, paper_text=in_full, details={"runs": known}),))


def _repeated_claim(
    npr: Sequence[float | None], analytic: Sequence[float | None], where: str, K: int, full: bool
) -> Claim:
    """By the differences seed by seed; full: whether K is all the times there are."""
    gaps = [a - b for a, b in zip(npr, analytic, strict=True) if a is not None and b is not None]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None
    found = [Difference(where, statistics.fmean(gaps), error)] if gaps else []
    times = "full timesteps" if full else f"K = {K}, not the full timesteps"
    return judge(f"NPR-DDPM needs fewer bits/dim than A-DDPM at {times}", found)


def _with_deviation(setting: str, row: str) -> str:
    """The paper's mean and standard deviation over seeds, for display."""
    found = published("repeats")["settings"][setting]["rows"][row]
    return f"{found['mean']:.5f} ± {found['standard_deviation']:.5f}"


def _chosen(evaluation: Evaluation, cells: Mapping[str, Cell]) -> Plan[dict[str, Result]]:
    """The cells' results with only the rows and K that were asked for."""
    evaluation.check_rows(list(rows_by_covariance().values()))
    for schedule in cells:
        _check_any_scored(evaluation, schedule)
    results = yield from results_of(cells)
    for schedule, result in results.items():
        lengths = evaluation.likelihood_steps(int(cells[schedule].settings["times"]))
        rows = [row for row in result["rows"] if int(row["K"]) in lengths]
        rows = [row for row in rows if evaluation.wants(row_of(row["covariance"]))]
        results[schedule] = {**result, "rows": rows}
    return results


def _check_any_scored(evaluation: Evaluation, schedule: str) -> None:
    """Refuse rows that all need what the bundle lacks, before a sweep that would not score them."""
    wanted = {covariance: row for covariance, row in rows_by_covariance().items() if evaluation.wants(row)}
    # a sweep scores those without a head whatever the bundle has
    reasons = [
        evaluation.obstacle(schedule, row) for covariance, row in wanted.items() if find_covariance(covariance).head
    ]
    if len(reasons) == len(wanted) and all(reasons):
        raise ValueError(reasons[0])


def _section(
    evaluation: Evaluation, schedule: str, records: list[Any], table: str = "bpd", setting: str | None = None
) -> Section:
    setting = setting or evaluation.paper_setting(schedule)
    lengths = sorted({int(record["K"]) for record in records})
    found = {(r["kind"], r["covariance"], int(r["K"])): r for r in records}
    order = [covariance for covariance in rows_by_covariance() if any(r["covariance"] == covariance for r in records)]
    rows = []
    for kind in ("ET", "OT"):
        for covariance in order:
            if (kind, covariance, lengths[0]) not in found:
                continue
            name = row_of(covariance)
            entries = []
            for K in lengths:
                record = found[kind, covariance, K]
                bits = record["bits_per_dim"]
                paper = published_value(table, setting, name, K, kind if table == "bpd" else None)
                details = {key: record[key] for key in ("times", "difference", "gain")}
                entries.append(Entry(bits["mean"], bits["standard_error"], paper, details=details))
            rows.append(Row(f"{kind} {name}", tuple(entries), kind))
    return Section(schedule, tuple(f"K = {K}" for K in lengths), tuple(rows), setting, decimals=3).with_best()


def _claims(results: Mapping[str, Result], times: Mapping[str, int]) -> list[Claim]:
    """times: of each sweep; a trajectory through all of them is even and optimal at once, and no evidence."""
    claims = []
    for kind in ("ET", "OT"):
        for covariance in ("beta_tilde", "beta", "analytic"):
            found = [difference for _, difference in _to_npr(results, covariance, kind)]
            if found:
                claims.append(judge(f"NPR-DDPM needs fewer bits/dim than {row_of(covariance)}, {kind}", found))
    gains = [
        Difference(f"{schedule}, {row_of(row['covariance'])}, K = {row['K']}", *row["gain"].values())
        for schedule, result in results.items()
        for row in result["rows"]
        if row["gain"]
        and row["covariance"] in ("beta", "analytic", "npr")
        and int(row["K"]) <= min(100, times[schedule] - 1)
    ]
    if gains:
        claims.append(judge("optimal trajectories need fewer bits/dim than even ones", gains))
    return claims


def _to_npr(results: Mapping[str, Result], covariance: str, kind: str) -> list[tuple[int, Difference]]:
    """NPR minus another covariance on the same images and noise, by K."""
    found = []
    for schedule, result in results.items():
        for row in result["rows"]:
            if row["covariance"] == covariance and row["kind"] == kind and row["difference"]:
                gap = row["difference"]
                where = f"{schedule}, K = {row['K']}"
                found.append((int(row["K"]), Difference(where, -gap["mean"], gap["standard_error"])))
    return found


def _bits(rows: list[Any], covariance: str) -> float | None:
    return next((float(row["bits_per_dim"]["mean"]) for row in rows if row["covariance"] == covariance), None)


def _notes(
    evaluation: Evaluation,
    cells: Mapping[Any, Cell],
    error: str | None = "a standard error over groups of images",
    chosen: bool = True,
) -> tuple[str, ...]:
    """chosen: the table has optimal trajectories."""
    settings = next(iter(cells.values())).settings
    embedded, others = evaluation.images.embedded, settings["train_images"]
    scored = f"{settings['images']} {'' if embedded else 'test images '}of {evaluation.images.name}"
    kind = "others" if embedded else "training images"
    by = f", trajectories chosen on {others} {kind}" if others and chosen else ""
    return (
        f"{scored}{by}, {settings['times']} times; the variance of the last step is the paper's, the normal CDF "
        f"exact{f'; ± is {error}' if error else ''}.",
        "Differences behind the claims are of the same images and noise.",
        *evaluation.paper_caveat,
    )


def _clamp_notes(results: Mapping[str, Result]) -> tuple[str, ...]:
    return tuple(
        f"{schedule}, {row_of(covariance)}: {clamped_in_words(covariance, below, above)}."
        for schedule, result in results.items()
        for covariance, (below, above) in result["clamped"].items()
        if below or above
    )
