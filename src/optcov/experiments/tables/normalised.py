"""Distances at equal time (tab:fid_cmp_norm): methods with a head take fewer steps, so that their time is less.

Beside A-DPM of K steps, and beside Gotta Go Fast of as many network evaluations as it chose.
"""

from __future__ import annotations

import math

from optcov.experiments.tables.cells import Plan, result_of, results_of
from optcov.experiments.tables.claims import judge_pairs
from optcov.experiments.tables.cost import cost_note, cost_ratio
from optcov.experiments.tables.distances import distance_entry, distance_notes
from optcov.experiments.tables.evaluation import LEAST_STEPS, Evaluation
from optcov.experiments.tables.published import published, published_value
from optcov.experiments.tables.result import Entry, Row, Section, TableResult

WITH_HEAD = ("NPR", "SN")  # how the methods begin that pay for a head; A-DPM, which they are compared with, has none


def normalised_steps(steps: float, ratio: float) -> int:
    """Most steps K' whose time K' * ratio is strictly less than that of `steps` without a head.

    >>> [normalised_steps(25, 1.005), normalised_steps(50, 1.045), normalised_steps(147, 1.007)]
    [24, 47, 145]
    """
    return math.ceil(steps / ratio) - 1


def normalised_work(evaluation: Evaluation) -> float:
    """A guess of the work, since measured costs and Gotta Go Fast decide."""
    size = evaluation.size
    lengths = sum(3 * sum(baseline_steps(evaluation, schedule)) for schedule in evaluation.schedules)
    return evaluation.cost_cell().work + size.samples * (lengths + sum(60.0 * 3 for _ in size.tolerances))


def normalised_plan(evaluation: Evaluation) -> Plan[TableResult]:
    """Distances at equal time: fewer steps for methods with a head; and Gotta Go Fast at equal evaluations."""
    reasons = [reason for schedule in evaluation.schedules if (reason := _none_possible(evaluation, schedule))]
    if len(reasons) == len(evaluation.schedules):
        raise ValueError(reasons[0])
    cost = yield from result_of(evaluation.cost_cell())
    ratios = {letter: cost_ratio(cost, f"{letter}-DDPM") for letter in WITH_HEAD}
    sections = []
    for schedule in evaluation.schedules:
        section = yield from _equal_time(evaluation, schedule, ratios)
        sections.append(section)
    if "vp_sde" in evaluation.schedules:
        sections.append((yield from _equal_evaluations(evaluation, "vp_sde", ratios)))
    pairs = {}
    for process in ("DDPM", "DPM"):
        for ours in WITH_HEAD:
            statement = f"{ours}-{process} has a smaller distance than A-{process} in strictly less time"
            pairs[statement] = (f"{ours}-{process}", f"A-{process}")
    pairs["SN-DPM has a smaller distance than Gotta Go Fast in strictly less time"] = ("SN-DPM", "Gotta Go Fast")
    claims = judge_pairs(sections, pairs)
    noted = (*distance_notes(evaluation), cost_note(cost))
    if "vp_sde" in evaluation.schedules:
        noted += _paper_beside_fast(evaluation.paper_setting("vp_sde"))
    title = f"Distances after normalising for the extra time, {evaluation.bundle.name}"
    name = evaluation.extractor.distance
    return TableResult("normalised", title, name, tuple(sections), noted, tuple(claims))


def baseline_steps(evaluation: Evaluation, schedule: str) -> list[int]:
    """The baseline's numbers of steps: those asked for, else 25 and 50 as in the paper, or fewer."""
    lengths = evaluation.distance_steps(schedule)
    usual = [] if evaluation.chose_steps else [K for K in lengths if K in (25, 50)]
    return usual or lengths


def _process(evaluation: Evaluation, schedule: str) -> str:
    return "DDPM" if schedule in evaluation.discrete_schedules else "DPM"


def _none_possible(evaluation: Evaluation, schedule: str) -> str | None:
    """Why the bundle can run none of the methods; None if it can run any."""
    reasons = [evaluation.obstacle(schedule, f"{name}-{_process(evaluation, schedule)}") for name in ("A", *WITH_HEAD)]
    return reasons[0] if all(reasons) else None


def _equal_time(evaluation: Evaluation, schedule: str, ratios: dict[str, float]) -> Plan[Section]:
    process = _process(evaluation, schedule)
    lengths = baseline_steps(evaluation, schedule)
    setting = evaluation.paper_setting(schedule)
    methods = {f"A-{process}": 1.0} | {f"{letter}-{process}": ratio for letter, ratio in ratios.items()}
    methods = {name: ratio for name, ratio in methods.items() if not evaluation.obstacle(schedule, name)}
    cells = {}
    for method, ratio in methods.items():
        for K in lengths:
            steps = K if method == f"A-{process}" else normalised_steps(K, ratio)
            if steps >= LEAST_STEPS:
                cells[method, K] = evaluation.distance_cell(schedule, method, steps)
    results = yield from results_of(cells)
    rows = []
    for method in methods:
        found = [(results.get((method, K)), published_value("normalised", setting, method, K)) for K in lengths]
        rows.append(Row(method, tuple(distance_entry(r, p) if r else Entry(text="-", paper=p) for r, p in found)))
    columns = []
    for K in lengths:
        ours = sorted({normalised_steps(K, ratio) for ratio in ratios.values()})
        columns.append(f"K = {K} ({', '.join(str(steps) for steps in ours)} with a head)")
    return Section(schedule, tuple(columns), tuple(rows), setting).with_best()


def _equal_evaluations(evaluation: Evaluation, schedule: str, ratios: dict[str, float]) -> Plan[Section]:
    """Gotta Go Fast at its tolerances, then our methods with as many evaluations in less time."""
    tolerances, most = evaluation.size.tolerances, evaluation.bundle_on(schedule).schedule.grid_size
    fast = yield from results_of(
        {tol: evaluation.distance_cell(schedule, "Gotta Go Fast", 60, tolerance=tol) for tol in tolerances}
    )
    methods = {f"{letter}-DPM": ratio for letter, ratio in ratios.items()}
    cells = {}
    for method, ratio in methods.items():
        for tol in tolerances:
            steps = min(normalised_steps(fast[tol]["evaluations"], ratio), most)
            if steps >= LEAST_STEPS and not evaluation.obstacle(schedule, method):
                cells[method, tol] = evaluation.distance_cell(schedule, method, steps)
    results = yield from results_of(cells)
    rows = [Row("Gotta Go Fast", tuple(distance_entry(fast[tol]) for tol in tolerances))]
    for method in methods:
        found = [results.get((method, tol)) for tol in tolerances]
        rows.append(Row(method, tuple(distance_entry(r) if r else Entry(text="-") for r in found)))
    columns = tuple(f"NFE = {fast[tol]['evaluations']:.0f}" for tol in tolerances)
    return Section(f"{schedule}, beside Gotta Go Fast", columns, tuple(rows)).with_best()


def _paper_beside_fast(setting: str | None) -> tuple[str, ...]:
    """The paper's FID beside Gotta Go Fast, in words: its numbers of evaluations are not ours."""
    paper = published("normalised")["gotta_go_fast"].get(setting)
    if paper is None:
        return ()
    at = [f"{a} ({b})" for a, b in zip(paper["evaluations"], paper["normalised_evaluations"], strict=True)]
    rows = [f"{name} {', '.join(f'{value:.2f}' for value in values)}" for name, values in paper["rows"].items()]
    return (f"The paper's FID at NFE {', '.join(at)}, in brackets that of our methods: {'; '.join(rows)}.",)
