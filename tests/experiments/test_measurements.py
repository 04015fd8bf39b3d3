"""The numbers of docs/results-0.1.md are those of the committed cells, of the model of version 0.1."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from optcov import bundle
from optcov.experiments.tables import SIZES, Evaluation, TableImages, TableResult, table_run
from optcov.experiments.tables.cells import read_cells
from optcov.experiments.tables.claims import Difference, row_differences
from optcov.experiments.tables.cost import cost_ratio
from optcov.experiments.tables.distances import CLAIMS, CONTINUOUS, DISCRETE, distance_entry
from optcov.experiments.tables.result import Entry, Row, Section
from optcov.experiments.tables.scoring import row_of
from optcov.experiments.tables.timesteps import SEARCHED, search_steps
from optcov.metrics import find_extractor

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "measurements" / "fashion-0.1"
RESULTS = (ROOT / "docs" / "results-0.1.md").read_text().splitlines()
CELLS = [record for path in sorted(MEASURED.glob("*.jsonl")) for record in read_cells(path).values()]
DISTANCES = [cell for cell in CELLS if cell["kind"] == "distance"]
REPORTED = [cell for cell in DISTANCES if cell["settings"]["samples"] == SIZES["middle"].samples]
LIKELIHOODS = [c for c in CELLS if c["kind"] == "likelihood" and c["settings"]["images"] == SIZES["middle"].images]
SCORED = [cell for cell in LIKELIHOODS if cell["settings"]["image_seed"] is None]
REPEATED = [cell for cell in LIKELIHOODS if cell["settings"]["image_seed"] is not None]
HEADINGS = {"linear": "## Samples", "vp_sde": "### The VP SDE", "cosine": "### The cosine schedule"}
LIKELIHOOD_HEADINGS = {"linear": "## Likelihoods", "cosine": "### Bits/dim on the cosine schedule"}


@pytest.fixture(scope="module")
def quick() -> Evaluation:
    """What `optcov table NAME --quick` evaluates."""
    images = TableImages.load(None, "fashion")
    model = bundle.load(ROOT / "tests" / "golden" / "fashion-0.1")
    return Evaluation(model, images, find_extractor("fashion"), SIZES["quick"])


def test_the_cells_are_measured_on_the_model_of_version_0_1(quick: Evaluation) -> None:
    assert {cell["settings"]["model"] for cell in CELLS} == {quick.identity}


@pytest.mark.parametrize("cell", REPORTED, ids=lambda cell: cell["label"])
def test_a_measured_distance_stands_in_the_results(cell: dict[str, Any]) -> None:
    rows = [line for line in RESULTS if line.startswith(f"| {cell['settings']['method']} |")]
    number = _number(cell["result"])
    assert any(number in row for row in rows), f"{cell['label']}: {number} is not in docs/results-0.1.md"


@pytest.mark.parametrize("schedule", HEADINGS)
def test_each_place_of_a_table_of_distances_has_its_cell(schedule: str) -> None:
    section, shown = _measured_section(schedule), _table(HEADINGS[schedule])
    assert list(shown) == ["", *(row.name for row in section.rows)]
    assert shown[""] == list(section.columns)
    for row in section.rows:
        for entry, text in zip(row.entries, shown[row.name], strict=True):
            ours = text.replace("*", "").partition("(")[0].strip()
            assert ours == (_number(entry.details) if entry.value is not None else ""), (row.name, text)


@pytest.mark.parametrize("schedule", HEADINGS)
def test_the_differences_behind_a_claim_on_distances_are_those_of_the_cells(schedule: str) -> None:
    section, text = _measured_section(schedule), "\n".join(_section(HEADINGS[schedule]))
    claimed = {pair: row_differences(section, *pair) for pair in CLAIMS.values()}
    assert any(claimed.values())
    for pair, found in claimed.items():
        assert ", ".join(_difference(one) for one in found) in text, pair


def test_what_optimal_trajectories_cost_the_distance_is_that_of_the_cells() -> None:
    shown, compared = "\n".join(_section("### Along optimal trajectories")), 0
    linear = [cell for cell in REPORTED if cell["settings"]["schedule_name"] == "linear"]
    for optimal in (cell for cell in linear if cell["settings"]["times"] is not None):
        wanted = {**optimal["settings"], "times": None}
        (even,) = (cell for cell in linear if cell["settings"] == wanted)
        rows = [Row(name, (distance_entry(cell["result"]),)) for name, cell in (("OT", optimal), ("ET", even))]
        (cost,) = row_differences(Section("linear", ("",), tuple(rows)), "OT", "ET")
        assert re.search(rf"^\| {wanted['method']} .*{re.escape(_difference(cost))} \|", shown, re.M), optimal["label"]
        assert cost.error is not None
        assert cost.mean > 5 * cost.error
        compared += 1
    assert compared == 7


@pytest.mark.parametrize("cell", SCORED, ids=lambda cell: cell["label"])
def test_each_place_of_a_table_of_bits_has_its_row_of_a_cell(cell: dict[str, Any]) -> None:
    shown = _table(LIKELIHOOD_HEADINGS[cell["settings"]["schedule_name"]])
    columns = [int(column.removeprefix("K = ")) for column in shown.pop("")]
    found: dict[str, dict[int, str]] = {}
    for row in cell["result"]["rows"]:
        bits = row["bits_per_dim"]
        of_row = found.setdefault(f"{row['kind']} {row_of(row['covariance'])}", {})
        of_row[row["K"]] = f"{bits['mean']:.3f} ± {bits['standard_error']:.3f}"
    assert set(shown) == set(found)
    for name, texts in shown.items():
        ours = [text.replace("*", "").partition("(")[0].strip() for text in texts]
        assert ours == [found[name][K] for K in columns], name


@pytest.mark.parametrize("kind", ["ET", "OT"])
@pytest.mark.parametrize("cell", SCORED, ids=lambda cell: cell["label"])
def test_the_bits_that_npr_saves_are_those_of_the_cells(cell: dict[str, Any], kind: str) -> None:
    gaps = [
        row["difference"]
        for row in sorted(cell["result"]["rows"], key=lambda row: row["K"])
        if row["kind"] == kind and row["covariance"] == "analytic" and row["K"] <= 100
    ]
    shown = ", ".join(f"−{gap['mean']:.2f} ± {gap['standard_error']:.3f}" for gap in gaps)
    assert shown in "\n".join(_section(LIKELIHOOD_HEADINGS[cell["settings"]["schedule_name"]]))


def test_the_least_steps_are_those_of_the_cells() -> None:
    found = {
        (cell["settings"]["method"], cell["settings"]["steps"]): cell["result"]
        for cell in REPORTED
        if cell["settings"]["schedule_name"] == "linear" and cell["settings"]["times"] is None
    }
    target = 1.022  # of the command, just above what A-DDIM reaches in 10 steps
    assert found["A-DDIM", 10]["limit"] < target < found["A-DDIM", 9]["limit"]
    (cost,) = (c["result"] for c in CELLS if c["kind"] == "cost" and c["settings"]["rounds"] == 101)
    shown = _table("### Least number of steps")
    assert set(shown) == {"", *SEARCHED.values()}
    for method in SEARCHED.values():
        steps, tried = shown[method]
        least, trials = _searched({K for (name, K), r in found.items() if name == method and r["limit"] <= target})
        assert tried == ", ".join(f"{K}: {_number(found[method, K])}" for K in sorted(trials)), method
        ratio = f"{cost_ratio(cost, method):.3f} × " if cost_ratio(cost, method) > 1 else ""
        assert steps.partition(" (")[0] == f"{ratio}{least}", method


def test_the_bits_over_seeds_are_those_of_the_cells() -> None:
    runs = [cell["result"]["rows"] for cell in REPEATED]
    assert len(runs) == SIZES["middle"].repeats
    bits = {
        name: [row["bits_per_dim"]["mean"] for rows in runs for row in rows if row["covariance"] == name]
        for name in ("analytic", "npr")
    }
    gaps = [a - b for a, b in zip(bits["analytic"], bits["npr"], strict=True)]
    text = " ".join(_section("### Over seeds"))
    for name, values in (("A-DDPM ", bits["analytic"]), ("NPR-DDPM ", bits["npr"])):
        assert f"{name}{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}" in text
    assert f"{statistics.fmean(gaps):.4f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.4f} lower" in text


def test_quick_tables_take_minutes_and_say_of_distances_what_the_page_says(
    quick: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, seconds = _stored("fid", quick, monkeypatch)
    assert seconds < 600  # as measured on two cores
    assert {claim.statement: claim.holds for claim in table.claims} == {
        "SN-DDPM has a smaller distance than A-DDPM": False,
        "NPR-DDPM has a smaller distance than A-DDPM": None,
        "SN-DDIM has a smaller distance than A-DDIM": False,
        "NPR-DDIM has a smaller distance than A-DDIM": None,
        "SN-DDIM has a smaller distance than DDIM": None,
        "SN-DPM has a smaller distance than A-DPM": False,
        "SN-DPM has a smaller distance than probability flow": True,
    }


def test_quick_tables_take_minutes_and_confirm_every_claim_on_likelihoods(
    quick: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, seconds = _stored("bpd", quick, monkeypatch)
    assert seconds < 600
    assert len(table.claims) == 7
    assert all(claim.holds for claim in table.claims)
    clamped = {note.partition(":")[0]: note for note in table.notes if ": " in note}
    assert "of the variances were negative" in clamped["linear, SN-DDPM"]
    assert "of the learned places lay below the range" in clamped["linear, Improved DDPM"]


def _searched(reaching: set[int]) -> tuple[int | None, list[int]]:
    """What the search at the middle size finds, and the numbers of steps it tries."""
    search, trials = search_steps(SIZES["middle"].target_steps, SIZES["middle"].search_limit), []
    try:
        trials.append(next(search))
        while True:
            trials.append(search.send(trials[-1] in reaching))
    except StopIteration as stop:
        return stop.value, trials


def _stored(name: str, quick: Evaluation, monkeypatch: pytest.MonkeyPatch) -> tuple[TableResult, float]:
    """A table from the committed cells alone, and how long their computation took."""
    stored = {cell["label"]: cell for cell in CELLS if _of(quick, cell)}
    monkeypatch.setattr(Evaluation, "compute", None)
    run = table_run(name, quick, MEASURED)
    asked = {progress.label for progress in run}
    return run.table, sum(stored[label]["seconds"] for label in asked)


def _of(quick: Evaluation, cell: dict[str, Any]) -> bool:
    settings = cell["settings"]
    return quick.reference.identity == settings.get("reference") or quick.images.test.checksum == settings.get("test")


def _number(result: dict[str, Any]) -> str:
    return f"{result['limit']:.2f} ± {result['standard_error']:.2f}"


def _section(heading: str) -> list[str]:
    """The lines of docs/results-0.1.md below a heading, up to the next."""
    begin = RESULTS.index(heading) + 1
    ends = (n for n in range(begin, len(RESULTS)) if RESULTS[n].startswith("#"))
    return RESULTS[begin : next(ends, len(RESULTS))]


def _table(heading: str) -> dict[str, list[str]]:
    """The first table below a heading: its rows by their names, "" for its columns."""
    lines = [line for line in _section(heading) if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    end = next((n for n, row in enumerate(rows[2:], 2) if row[0].startswith("claim")), len(rows))
    return {name: cells for name, *cells in (rows[0], *rows[2:end])}


def _measured_section(schedule: str) -> Section:
    """The table of distances of a schedule as its cells have it, with a place for each K that any method has."""
    found = {
        (cell["settings"]["method"], cell["settings"]["steps"]): cell["result"]
        for cell in REPORTED
        if cell["settings"]["schedule_name"] == schedule and cell["settings"]["times"] is None
    }
    groups = CONTINUOUS if schedule == "vp_sde" else DISCRETE
    usual = [K for K in SIZES["middle"].steps if any(k == K for _, k in found)]
    rows = [
        Row(name, tuple(distance_entry(found[name, K]) if (name, K) in found else Entry(text="") for K in usual), group)
        for group, names in groups.items()
        for name in names
    ]
    return Section(schedule, tuple(f"K = {K}" for K in usual), tuple(rows))


def _difference(difference: Difference) -> str:
    """As the page prints it: two decimals, three where the error needs them."""
    assert difference.error is not None
    decimals = 3 if difference.error < 0.015 else 2
    return f"{difference.mean:+.{decimals}f} ± {difference.error:.{decimals}f}".replace("-", "−")
