"""Tables that count the cost of heads: least steps to a distance (tab:timesteps), equal time (tab:fid_cmp_norm)."""

from __future__ import annotations

import math
from collections.abc import Generator

from optcov.tables.cells import Plan, Result, gather, one
from optcov.tables.claims import lower_in_all
from optcov.tables.cost import cost_ratio
from optcov.tables.distances import distance_entry, notes
from optcov.tables.evaluation import LEAST_STEPS, MOST_STEPS, Evaluation
from optcov.tables.published import published
from optcov.tables.result import Claim, Entry, Row, Section, TableResult

SEARCHED = {  # row of tab:timesteps -> method, and the head whose time it pays
    "DDPM": ("DDPM, beta-tilde", ""),
    "DDIM": ("DDIM", ""),
    "Improved DDPM": ("Improved DDPM", "range"),
    "Analytic-DPM": ("A-DDIM", ""),
    "NPR-DPM": ("NPR-DDIM", "npr"),
    "SN-DPM": ("SN-DDIM", "sn"),
}
BY_DDPM = ("LSUN Bedroom",)  # where the paper's methods of tab:timesteps reverse DDPM's forward process, not DDIM's


def normalised_steps(steps: float, ratio: float) -> int:
    """Most steps K' whose time K' * ratio is strictly less than that of `steps` without a head.

    >>> [normalised_steps(25, 1.005), normalised_steps(50, 1.045), normalised_steps(147, 1.007)]
    [24, 47, 145]
    """
    return math.ceil(steps / ratio) - 1


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
    cost = yield from one(evaluation.cost_cell())
    if target is None:
        reached = yield from one(evaluation.distance_cell(schedule, "A-DDIM", start))
        target = distance_entry(reached).value
        assert target is not None
    setting = evaluation.paper_setting(schedule)
    paper = published("timesteps")["settings"].get((setting or "").split(" (")[0], {})
    rows = []
    for name, (usual, head) in SEARCHED.items():
        method = usual.replace("-DDIM", "-DDPM") if setting in BY_DDPM else usual
        theirs = _paper_text(paper.get(name))
        if evaluation.missing(schedule, method):
            rows.append(Row(name, (Entry(text="-", paper_text=theirs),)))
            continue
        found = yield from _search(evaluation, schedule, method, target)
        rows.append(Row(name, (_steps_entry(found, cost_ratio(cost, head), limit, theirs),)))
    name = evaluation.extractor.distance
    section = Section(schedule, (f"steps to {name} {target:.2f}",), tuple(rows), setting).with_best()
    claims = _fewer_steps(section)
    title = f"Least number of steps to reach {name} {target:.2f}, {evaluation.bundle.name}"
    noted = (*notes(evaluation), "cost of a step × steps (distance reached); a monotone search.")
    return TableResult("timesteps", title, "steps", (section,), noted, claims)


def _search(evaluation: Evaluation, schedule: str, method: str, target: float) -> Plan[tuple[int, Result] | None]:
    search = search_steps(*_search_range(evaluation, schedule))
    results: dict[int, Result] = {}
    try:
        K = next(search)
        while True:
            results[K] = yield from one(evaluation.distance_cell(schedule, method, K))
            value = distance_entry(results[K]).value
            assert value is not None
            K = search.send(value <= target)
    except StopIteration as stop:
        return None if stop.value is None else (stop.value, results[stop.value])


def _search_range(evaluation: Evaluation, schedule: str) -> tuple[int, int]:
    """Where the search starts, and the most steps it tries: those of the size, or all that the schedule has."""
    limit = min(evaluation.size.search_limit, evaluation.on(schedule).schedule.steps or MOST_STEPS)
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


def normalised_work(evaluation: Evaluation) -> float:
    """A guess of the work, since measured costs and Gotta Go Fast decide."""
    size = evaluation.size
    lengths = sum(3 * K for _, K in _pairs(evaluation))
    return evaluation.cost_cell().work + size.samples * (lengths + sum(60.0 * 3 for _ in size.tolerances))


def normalised_plan(evaluation: Evaluation) -> Plan[TableResult]:
    """Distances at equal time: fewer steps for methods with a head; and Gotta Go Fast at equal evaluations."""
    cost = yield from one(evaluation.cost_cell())
    ratios = {"npr": cost_ratio(cost, "npr"), "sn": cost_ratio(cost, "sn")}
    sections = []
    for schedule in evaluation.schedules:
        section = yield from _equal_time(evaluation, schedule, ratios)
        sections.append(section)
    if "vp_sde" in evaluation.schedules:
        sections.append((yield from _equal_evaluations(evaluation, "vp_sde", ratios)))
    pairs = {}
    for process in ("DDPM", "DPM"):
        for ours in ("NPR", "SN"):
            statement = f"{ours}-{process} has a smaller distance than A-{process} in strictly less time"
            pairs[statement] = (f"{ours}-{process}", f"A-{process}")
    pairs["SN-DPM has a smaller distance than Gotta Go Fast in strictly less time"] = ("SN-DPM", "Gotta Go Fast")
    claims = lower_in_all(sections, pairs)
    measured = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    noted = (*notes(evaluation), f"Time of an evaluation with a head over that without: {measured}.")
    if "vp_sde" in evaluation.schedules:
        noted += _paper_beside_fast(evaluation.paper_setting("vp_sde"))
    title = f"Distances after normalising for the extra time, {evaluation.bundle.name}"
    name = evaluation.extractor.distance
    return TableResult("normalised", title, name, tuple(sections), noted, tuple(claims))


def _pairs(evaluation: Evaluation) -> list[tuple[str, int]]:
    """Schedules with the baseline's numbers of steps: the paper's 25 and 50, or fewer at smaller sizes."""
    found = []
    for schedule in evaluation.schedules:
        lengths = evaluation.distance_steps(schedule)
        found += [(schedule, K) for K in [K for K in lengths if K in (25, 50)] or lengths]
    return found


def _equal_time(evaluation: Evaluation, schedule: str, ratios: dict[str, float]) -> Plan[Section]:
    process = "DDPM" if schedule in evaluation.discrete_schedules else "DPM"
    lengths = [K for name, K in _pairs(evaluation) if name == schedule]
    setting = evaluation.paper_setting(schedule)
    paper = published("normalised")["settings"].get(setting, {"steps": [], "rows": {}})
    methods = {f"A-{process}": 1.0} | {f"{head.upper()}-{process}": ratio for head, ratio in ratios.items()}
    cells = {}
    for method, ratio in methods.items():
        if not evaluation.missing(schedule, method):
            for K in lengths:
                steps = K if method == f"A-{process}" else normalised_steps(K, ratio)
                if steps >= LEAST_STEPS:
                    cells[method, K] = evaluation.distance_cell(schedule, method, steps)
    results = yield from gather(cells)
    rows = []
    for method in dict.fromkeys(name for name, _ in cells):
        theirs = {K: paper["rows"][method][paper["steps"].index(K)] for K in lengths if K in paper["steps"]}
        found = [(results.get((method, K)), theirs.get(K)) for K in lengths]
        rows.append(Row(method, tuple(distance_entry(r, p) if r else Entry(text="-", paper=p) for r, p in found)))
    columns = []
    for K in lengths:
        ours = sorted({normalised_steps(K, ratio) for ratio in ratios.values()})
        columns.append(f"K = {K} ({', '.join(str(steps) for steps in ours)} with a head)")
    return Section(schedule, tuple(columns), tuple(rows), setting).with_best()


def _equal_evaluations(evaluation: Evaluation, schedule: str, ratios: dict[str, float]) -> Plan[Section]:
    """Gotta Go Fast at its tolerances, then our methods with as many evaluations in less time."""
    tolerances = evaluation.size.tolerances
    fast = yield from gather(
        {tol: evaluation.distance_cell(schedule, "Gotta Go Fast", 60, tolerance=tol) for tol in tolerances}
    )
    methods = {f"{head.upper()}-DPM": ratio for head, ratio in ratios.items()}
    cells = {}
    for method, ratio in methods.items():
        for tol in tolerances:
            steps = min(normalised_steps(fast[tol]["evaluations"], ratio), MOST_STEPS)
            if steps >= LEAST_STEPS and not evaluation.missing(schedule, method):
                cells[method, tol] = evaluation.distance_cell(schedule, method, steps)
    results = yield from gather(cells)
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
