"""Tables of distances: methods against K (tab:fid), and the same beside diffusers' own schedulers (peers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optcov.bundle import BundleError
from optcov.methods import PEER_METHODS
from optcov.solvers import PEERS as SCHEDULERS
from optcov.tables.cells import Cell, Plan, Result, gather
from optcov.tables.claims import judge, lower_in_all, lower_rows
from optcov.tables.evaluation import Evaluation
from optcov.tables.published import published_value
from optcov.tables.result import Claim, Entry, Row, Section, TableResult

DISCRETE = {
    "DDPM": ("DDPM, beta-tilde", "DDPM, beta", "A-DDPM", "NPR-DDPM", "SN-DDPM"),
    "DDIM": ("DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM"),
}
CONTINUOUS = {
    "VP SDE": ("Euler-Maruyama", "Ancestral sampling", "Probability flow", "A-DPM", "NPR-DPM", "SN-DPM"),
}
PEERS = {
    "ours": ("DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM", "NPR-DDPM", "SN-DDPM"),
    "diffusers": tuple(PEER_METHODS),
}
OPTIMAL = ", OT"  # behind the name of a row along optimal trajectories

Key = tuple[str, str, int]  # schedule, row, K

CLAIMS = {
    "SN-DDPM has a smaller distance than A-DDPM": ("SN-DDPM", "A-DDPM"),
    "NPR-DDPM has a smaller distance than A-DDPM": ("NPR-DDPM", "A-DDPM"),
    "SN-DDIM has a smaller distance than A-DDIM": ("SN-DDIM", "A-DDIM"),
    "NPR-DDIM has a smaller distance than A-DDIM": ("NPR-DDIM", "A-DDIM"),
    "SN-DDIM has a smaller distance than DDIM": ("SN-DDIM", "DDIM"),
    "SN-DPM has a smaller distance than A-DPM": ("SN-DPM", "A-DPM"),
    "SN-DPM has a smaller distance than probability flow": ("SN-DPM", "Probability flow"),
}


def fid_cells(evaluation: Evaluation, optimal: bool = False) -> dict[Key, Cell]:
    """The cells of tab:fid; optimal: also along the optimal trajectories that the bundle has."""
    cells: dict[Key, Cell] = {}
    for schedule in evaluation.schedules:
        groups = DISCRETE if schedule in evaluation.discrete_schedules else CONTINUOUS
        for method in (name for group in groups.values() for name in group):
            if evaluation.missing(schedule, method):
                continue
            for K in _possible(evaluation, schedule):
                cells[schedule, method, K] = evaluation.distance_cell(schedule, method, K)
                times = _optimal_times(evaluation, schedule, method, K) if optimal else None
                if times is not None:
                    cells[schedule, method + OPTIMAL, K] = evaluation.distance_cell(schedule, method, K, times=times)
    return cells


def fid_plan(evaluation: Evaluation, cells: Mapping[Key, Cell]) -> Plan[TableResult]:
    """The table of distances."""
    results = yield from gather(cells)
    sections = []
    for schedule in evaluation.schedules:
        groups = DISCRETE if schedule in evaluation.discrete_schedules else CONTINUOUS
        sections.append(_section(evaluation, schedule, groups, results, "fid"))
    claims = lower_in_all(sections, CLAIMS)
    optimal = [(s, row.name) for s in sections for row in s.rows if row.name.endswith(OPTIMAL)]
    found = [d for s, name in optimal for d in lower_rows(s, name.removesuffix(OPTIMAL), name)]
    if found:
        claims.append(judge("optimal trajectories do not help the distance of samples", found))
    title = f"{evaluation.extractor.distance} of {evaluation.size.samples} samples, {evaluation.bundle.name}"
    return TableResult("fid", title, evaluation.extractor.distance, tuple(sections), notes(evaluation), tuple(claims))


def peers_cells(evaluation: Evaluation) -> dict[Key, Cell]:
    """The cells of the table of peers, on the discrete schedules: diffusers knows no other."""
    cells = {}
    for schedule in _for_peers(evaluation):
        for method in (name for group in PEERS.values() for name in group):
            for K in _possible(evaluation, schedule):
                if not (evaluation.missing(schedule, method) or _stride_misses(evaluation, schedule, method, K)):
                    cells[schedule, method, K] = evaluation.distance_cell(schedule, method, K)
    return cells


def peers_plan(evaluation: Evaluation, cells: Mapping[Key, Cell]) -> Plan[TableResult]:
    """Our methods beside diffusers' own schedulers on the same network, from the same noise."""
    results = yield from gather(cells)
    sections = [_section(evaluation, schedule, PEERS, results, "fid") for schedule in _for_peers(evaluation)]
    claims: list[Claim] = []
    for peer in PEER_METHODS:
        claims += lower_in_all(sections, {f"SN-DDIM has a smaller distance than {peer}": ("SN-DDIM", peer)})
    title = f"{evaluation.extractor.distance} beside diffusers' schedulers, {evaluation.bundle.name}"
    noted = (*notes(evaluation), "The comparison with diffusers is ours; the paper has no such claim.")
    return TableResult("peers", title, evaluation.extractor.distance, tuple(sections), noted, tuple(claims))


def distance_entry(result: Result, paper: float | None = None) -> Entry:
    """Our limit of many samples with its standard error."""
    value = result["value"] if result["limit"] is None else result["limit"]
    return Entry(value, result["standard_error"], paper, details=result)


def notes(evaluation: Evaluation) -> tuple[str, ...]:
    """What a reader must know to judge the distances."""
    name, samples = evaluation.extractor.distance, evaluation.size.samples
    found = [
        f"{name} is extrapolated from {samples} samples to infinitely many; ± is a standard error by resampling.",
        f"The samples are compared with {evaluation.images.name}; all methods start from the same noise.",
    ]
    if name != "FID":
        found.append(
            f"The paper's numbers are FID of other data and networks: compare orderings, not values, of {name}."
        )
    return tuple(found)


def _section(
    evaluation: Evaluation,
    schedule: str,
    groups: Mapping[str, Sequence[str]],
    results: Mapping[Key, Result],
    table: str,
) -> Section:
    setting, lengths = evaluation.paper_setting(schedule), _possible(evaluation, schedule)
    rows = []
    for group, methods in groups.items():
        for method in methods:
            entries = []
            reason = evaluation.missing(schedule, method)
            for K in lengths:
                paper = published_value(table, setting, method, K)
                result = results.get((schedule, method, K))
                if result is None:
                    entries.append(Entry(text="-", paper=paper, details={"reason": reason}))
                else:
                    entries.append(distance_entry(result, paper))
            rows.append(Row(method, tuple(entries), group))
        for name in (method + OPTIMAL for method in methods):
            known = [results.get((schedule, name, K)) for K in lengths]
            if any(known):
                rows.append(Row(name, tuple(distance_entry(r) if r else Entry(text="-") for r in known), group))
    return Section(schedule, tuple(f"K = {K}" for K in lengths), tuple(rows), setting).with_best()


def _possible(evaluation: Evaluation, schedule: str) -> list[int]:
    steps = evaluation.on(schedule).schedule.steps
    return [K for K in evaluation.size.steps if steps is None or steps >= K]


def _optimal_times(evaluation: Evaluation, schedule: str, method: str, K: int) -> tuple[float, ...] | None:
    try:
        return evaluation.on(schedule).trajectory(K, "optimal", method).times
    except BundleError:
        return None  # the bundle has no such trajectory


def _stride_misses(evaluation: Evaluation, schedule: str, method: str, K: int) -> bool:
    """Whether a scheduler that steps by N // K would not end at its last time."""
    steps = evaluation.on(schedule).schedule.steps
    return method in SCHEDULERS and SCHEDULERS[method].fixed_stride and (steps or 0) % K != 0


def _for_peers(evaluation: Evaluation) -> list[str]:
    names = evaluation.discrete_schedules
    if not names:
        raise ValueError(
            f"diffusers' schedulers need a discrete schedule, not {', '.join(evaluation.schedules)}; "
            f"add --schedules linear"
        )
    return names
