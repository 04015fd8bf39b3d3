"""Least number of steps to reach a distance, the cost of a step counted (tab:timesteps): a monotone search."""

from __future__ import annotations

import math
from collections.abc import Generator

from optcov.experiments.tables.cells import Plan, Result, result_of
from optcov.experiments.tables.cost import cost_note, cost_ratio
from optcov.experiments.tables.distances import distance_entry, distance_notes
from optcov.experiments.tables.evaluation import LEAST_STEPS, Evaluation
from optcov.experiments.tables.published import published
from optcov.experiments.tables.result import Claim, Entry, Row, Section, TableResult

SEARCHED = {  # row of tab:timesteps -> method
    "DDPM": "DDPM, beta-tilde",
    "DDIM": "DDIM",
    "Improved DDPM": "Improved DDPM",
    "Analytic-DPM": "A-DDIM",
    "NPR-DPM": "NPR-DDIM",
    "SN-DPM": "SN-DDIM",
}
BY_DDPM = ("LSUN Bedroom",)  # where the paper's methods of tab:timesteps reverse DDPM's forward process, not DDIM's


def search_steps(start: int, limit: int) -> Generator[int, bool, int | None]:
    """Find the least K of LEAST_STEPS..limit that reaches a target: yields K, is sent whether it does.

    Assumes that more steps do not hurt. Doubles or halves from `start` until the answer changes, then bisects.
    """
    low, high, K = LEAST_STEPS - 1, limit + 1, min(max(start, LEAST_STEPS), limit)
    while high - low > 1:
        if (yield K):
            high = K
        else:
            low = K
        if low < LEAST_STEPS:
            K = max(LEAST_STEPS, high // 2)
        elif high > limit:
            K = min(limit, 2 * low)
        else:
            K = (low + high) // 2
    return high if high <= limit else None


def timesteps_work(evaluation: Evaluation) -> float:
    """A guess of the work, since the search decides."""
    size = evaluation.size
    return evaluation.cost_cell().work + len(SEARCHED) * size.samples * 3.0 * size.target_steps


def timesteps_plan(evaluation: Evaluation, target: float | None = None) -> Plan[TableResult]:
    """Least steps to a distance, times the cost of a step; by default what A-DDIM reaches in a few.

    The paper's target, a FID of 6, is what Analytic-DPM reaches in 25 steps on CIFAR10.
    """
    if target is not None and not 0 < target < math.inf:
        raise ValueError(f"a target of {target} cannot be reached; give a positive distance")
    schedule = (evaluation.discrete_schedules or evaluation.schedules)[0]
    start, limit = _search_range(evaluation, schedule)
    cost = yield from result_of(evaluation.cost_cell())
    setting = evaluation.paper_setting(schedule)
    if target is None:
        reached = yield from result_of(evaluation.distance_cell(schedule, _searched("A-DDIM", setting), start))
        target = distance_entry(reached).value
        assert target is not None
    paper = published("timesteps")["settings"].get(setting, {})
    rows = []
    for name, usual in SEARCHED.items():
        method = _searched(usual, setting)
        theirs = _paper_text(paper.get(name))
        if evaluation.obstacle(schedule, method):
            rows.append(Row(name, (Entry(text="-", paper_text=theirs),)))
            continue
        found = yield from _search(evaluation, schedule, method, target)
        rows.append(Row(name, (_steps_entry(found, cost_ratio(cost, method), limit, theirs),)))
    name = evaluation.extractor.distance
    section = Section(schedule, (f"steps to {name} {target:.2f}",), tuple(rows), setting if paper else None).with_best()
    claims = _fewer_steps(section)
    title = f"Least number of steps to reach {name} {target:.2f}, {evaluation.bundle.name}"
    noted = (
        *distance_notes(evaluation),
        "cost of a step × steps (distance reached); a monotone search.",
        cost_note(cost),
    )
    return TableResult("timesteps", title, "steps", (section,), noted, claims)


def _searched(method: str, setting: str | None) -> str:
    """By the forward process that the paper has beside a setting."""
    return method.replace("-DDIM", "-DDPM") if setting in BY_DDPM else method


def _search(evaluation: Evaluation, schedule: str, method: str, target: float) -> Plan[tuple[int, Result] | None]:
    search = search_steps(*_search_range(evaluation, schedule))
    results: dict[int, Result] = {}
    try:
        K = next(search)
        while True:
            results[K] = yield from result_of(evaluation.distance_cell(schedule, method, K))
            value = distance_entry(results[K]).value
            assert value is not None
            K = search.send(value <= target)
    except StopIteration as stop:
        return None if stop.value is None else (stop.value, results[stop.value])


def _search_range(evaluation: Evaluation, schedule: str) -> tuple[int, int]:
    """Where the search starts, and the most steps it tries: those of the size, or all that the schedule has."""
    limit = min(evaluation.size.search_limit, evaluation.bundle_on(schedule).schedule.grid_size)
    return min(evaluation.size.target_steps, limit), limit


def _steps_entry(found: tuple[int, Result] | None, ratio: float, limit: int, paper: str | None) -> Entry:
    if found is None:
        return Entry(text=f"> {limit}", paper_text=paper)
    K, result = found
    reached = distance_entry(result)
    cost = "" if ratio == 1 else f"{ratio:.3f}×"
    text = f"{cost}{K} ({reached.ours(2)})"
    return Entry(ratio * K, None, None, text, paper, details={"steps": K, "cost_ratio": ratio, **result})


def _paper_text(record: dict[str, object] | None) -> str | None:
    if record is None:
        return None
    if "note" in record:
        return str(record["note"])
    cost = "" if record["cost_ratio"] == 1 else f"{record['cost_ratio']:.3f}×"
    return f"{cost}{record['steps']}, FID {record['fid']}"


def _fewer_steps(section: Section) -> tuple[Claim, ...]:
    values = {row.name: row.entries[0].value for row in section.rows}
    claims = []
    for ours in ("NPR-DPM", "SN-DPM"):
        a, b = values.get(ours), values.get("Analytic-DPM")
        if a is not None and b is not None:
            evidence = f"{a:.1f} against {b:.1f} steps, which have no standard error"
            claims.append(Claim(f"{ours} needs fewer steps than Analytic-DPM, its cost counted", None, evidence))
    return tuple(claims)
