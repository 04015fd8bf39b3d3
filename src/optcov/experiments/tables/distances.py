"""Tables of distances: methods against K (tab:fid), and the same beside diffusers' own schedulers (peers)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optcov.experiments.tables.cells import Cell, Plan, Result, results_of
from optcov.experiments.tables.claims import judge, judge_pairs, row_differences
from optcov.experiments.tables.evaluation import Evaluation
from optcov.experiments.tables.likelihoods import bpd_cells
from optcov.experiments.tables.published import published, published_value
from optcov.experiments.tables.result import Claim, Entry, Row, Section, TableResult
from optcov.experiments.tables.scoring import rows_by_covariance
from optcov.methods import PEER_METHODS, find_method
from optcov.metrics.extractors import FID
from optcov.solvers import PEERS as SCHEDULERS

DISCRETE = {
    "DDPM": ("DDPM, beta-tilde", "DDPM, beta", "A-DDPM", "NPR-DDPM", "SN-DDPM"),
    "DDIM": ("DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM"),
}
BEYOND = {  # rows that the paper does not have, where they are asked for
    "beyond the paper": (
        *(f"{letter}-{process}" for letter in ("CNPR", "CSN", "OCM", "Spectral") for process in DISCRETE),
        "Bridge 2M",
    ),
}
CONTINUOUS = {
    "VP SDE": ("Euler-Maruyama", "Ancestral sampling", "Probability flow", "A-DPM", "NPR-DPM", "SN-DPM"),
}
PEERS = {
    "ours": ("DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM", "NPR-DDPM", "SN-DDPM", "Bridge 2M"),
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


def fid_cells(evaluation: Evaluation) -> dict[Key, Cell]:
    """The cells of tab:fid along even trajectories."""
    groups = {name: _groups(evaluation, name) for name in evaluation.schedules}
    evaluation.check_rows([row for found in groups.values() for row in _names(found)])
    return _possible_cells(evaluation, groups)


def _possible_cells(evaluation: Evaluation, groups: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[Key, Cell]:
    """Of the rows that were asked for, by schedule, what the bundle can run; an error says why if that is nothing."""
    cells: dict[Key, Cell] = {}
    reasons = []
    for schedule, found in groups.items():
        for method in filter(evaluation.wants, _names(found)):
            reason = evaluation.obstacle(schedule, method)
            if reason:
                reasons.append(reason)
                continue
            for K in evaluation.distance_steps(schedule):
                cells[schedule, method, K] = evaluation.distance_cell(schedule, method, K)
    if reasons and not cells:
        raise ValueError(reasons[0])
    return cells


def fid_plan(evaluation: Evaluation, cells: Mapping[Key, Cell], optimal: bool = False) -> Plan[TableResult]:
    """The table of distances; optimal: also along the trajectories that tab:bpd finds optimal for each covariance."""
    if optimal:
        sweeps = yield from results_of(bpd_cells(evaluation))
        cells = {**cells, **_optimal_cells(evaluation, cells, sweeps)}
    results = yield from results_of(cells)
    sections = [_section(evaluation, schedule, _groups(evaluation, schedule), results) for schedule in _shown(cells)]
    claims = judge_pairs(sections, CLAIMS)
    along = [(s, row.name) for s in sections for row in s.rows if row.name.endswith(OPTIMAL)]
    found = [d for s, name in along for d in row_differences(s, name.removesuffix(OPTIMAL), name)]
    if found:
        claims.append(judge("optimal trajectories do not help the distance of samples", found))
    title = f"{evaluation.extractor.distance} of {evaluation.size.samples} samples, {evaluation.bundle.name}"
    return TableResult(
        "fid", title, evaluation.extractor.distance, tuple(sections), distance_notes(evaluation), tuple(claims)
    )


def fid_work(evaluation: Evaluation, cells: Mapping[Key, Cell], optimal: bool) -> float:
    """Of all cells; along optimal trajectories, whose cells are not known yet, one as large per row of tab:bpd."""
    work = sum(cell.work for cell in cells.values())
    if optimal:
        sweeps = bpd_cells(evaluation)
        work += sum(cell.work for cell in sweeps.values())
        work += sum(cell.work for (schedule, row, _), cell in cells.items() if schedule in sweeps and _covariance(row))
    return work


def peers_cells(evaluation: Evaluation) -> dict[Key, Cell]:
    """The cells of the table of peers, on the discrete schedules: diffusers knows no other."""
    evaluation.check_rows(_names(PEERS))
    cells = _possible_cells(evaluation, dict.fromkeys(_for_peers(evaluation), PEERS))
    return {key: cell for key, cell in cells.items() if not _stride_misses(evaluation, *key)}


def peers_plan(evaluation: Evaluation, cells: Mapping[Key, Cell]) -> Plan[TableResult]:
    """Our methods beside diffusers' own schedulers on the same network, from the same noise."""
    results = yield from results_of(cells)
    sections = [_section(evaluation, schedule, PEERS, results) for schedule in _shown(cells)]
    claims: list[Claim] = []
    for peer in PEER_METHODS:
        claims += judge_pairs(sections, {f"SN-DDIM has a smaller distance than {peer}": ("SN-DDIM", peer)})
    title = f"{evaluation.extractor.distance} beside diffusers' schedulers, {evaluation.bundle.name}"
    noted = (*distance_notes(evaluation), "The comparison with diffusers is ours; the paper has no such claim.")
    return TableResult("peers", title, evaluation.extractor.distance, tuple(sections), noted, tuple(claims))


def distance_entry(result: Result, paper: float | None = None) -> Entry:
    """Our limit of many samples with its standard error; of as many samples as in the paper, its FID as it stands."""
    plain = result["limit"] is None or _as_in_paper(result["name"], result["samples"])
    return Entry(result["value" if plain else "limit"], result["standard_error"], paper, details=result)


def _as_in_paper(distance: str, samples: int) -> bool:
    return distance == FID and samples >= int(published("settings")["common"]["fid_samples"])


def distance_notes(evaluation: Evaluation) -> tuple[str, ...]:
    """What a reader must know to judge the distances."""
    name, samples = evaluation.extractor.distance, evaluation.size.samples
    plain = _as_in_paper(name, samples)
    found = [
        f"{name} is {f'of {samples} samples' if plain else f'extrapolated from {samples} samples to infinitely many'}; "
        f"± is a standard error by resampling.",
        f"The samples are compared with {evaluation.reference.name}; all methods start from the same noise.",
    ]
    if evaluation.bundle.classes:
        found.append("Images are drawn by class, each class in turn.")
    if "vp_sde" in evaluation.schedules:
        found.append("Euler-Maruyama and probability flow step as score_sde's code does, which the paper ran.")
    if name == FID:
        found += [] if plain else ["The paper's FID is of 50,000 samples, and not extrapolated."]
        found += evaluation.paper_caveat
    else:
        found.append(
            f"The paper's numbers are FID of other data and networks: compare orderings, not values, of {name}."
        )
    return tuple(found)


def _section(
    evaluation: Evaluation, schedule: str, groups: Mapping[str, Sequence[str]], results: Mapping[Key, Result]
) -> Section:
    setting, lengths = evaluation.paper_setting(schedule), evaluation.distance_steps(schedule)
    rows = []
    for group, names in groups.items():
        methods = [name for name in names if evaluation.wants(name)]
        for method in methods:
            entries = []
            reason = evaluation.obstacle(schedule, method)
            for K in lengths:
                paper = published_value("fid", setting, method, K)
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


def _groups(evaluation: Evaluation, schedule: str) -> Mapping[str, Sequence[str]]:
    if schedule not in evaluation.discrete_schedules:
        return CONTINUOUS
    asked = {group: [name for name in names if evaluation.names(name)] for group, names in BEYOND.items()}
    return {**DISCRETE, **{group: names for group, names in asked.items() if names}}


def _names(groups: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for names in groups.values() for name in names]


def _shown(cells: Mapping[Key, Cell]) -> list[str]:
    """Schedules that have a cell."""
    if not cells:
        raise ValueError("no row of this table was chosen; leave --method out, or name rows that it has")
    return list(dict.fromkeys(schedule for schedule, _, _ in cells))


def _optimal_cells(evaluation: Evaluation, even: Mapping[Key, Cell], sweeps: Mapping[str, Result]) -> dict[Key, Cell]:
    """A cell along the optimal trajectory beside each even one that tab:bpd has a trajectory for."""
    times = {
        (schedule, row["covariance"], int(row["K"])): row["times"]
        for schedule, result in sweeps.items()
        for row in result["rows"]
        if row["kind"] == "OT"
    }
    cells = {}
    for schedule, method, K in even:
        found = times.get((schedule, _covariance(method), K))
        if found is not None:
            cells[schedule, method + OPTIMAL, K] = evaluation.distance_cell(schedule, method, K, times=found)
    return cells


def _covariance(method: str) -> str | None:
    """The covariance that a row of tab:bpd scores, by the method that samples with it; None for DDIM and solvers."""
    name = find_method(method).discrete_name
    return next((covariance for covariance, row in rows_by_covariance().items() if row == name), None)


def _stride_misses(evaluation: Evaluation, schedule: str, method: str, K: int) -> bool:
    """Whether a scheduler that steps by N // K would not end at its last time."""
    steps = evaluation.bundle_on(schedule).schedule.grid_size
    return method in SCHEDULERS and SCHEDULERS[method].fixed_stride and steps % K != 0


def _for_peers(evaluation: Evaluation) -> list[str]:
    names = evaluation.discrete_schedules
    if not names:
        raise ValueError(
            f"diffusers' schedulers need a discrete schedule, not {', '.join(evaluation.schedules)}; "
            f"add --schedules linear"
        )
    return names
