"""What docs/results-few-steps.md says is what was measured, in measurements/few-steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optcov.metrics import jackknife_error

ROOT = Path(__file__).parents[2]


def lines(name: str) -> list[dict[str, Any]]:
    """What a file of measurements holds."""
    return [json.loads(line) for line in (ROOT / f"measurements/{name}.jsonl").read_text().splitlines()]


def words(gap: float, error: float, digits: int = 3) -> str:
    """A difference as the page says it."""
    return f"{gap:+.{digits}f} ± {error:.{digits}f}".replace("-", "−")


CELLS = lines("few-steps/fashion")
TABLES = [cell for name in ("fid", "peers") for cell in lines(f"cifar10/{name}")]
BRIDGE = {cell["steps"]: cell for cell in CELLS if cell["row"] == "Bridge 2M"}
PEERS = ("UniPC", "DPM-Solver++")
KARRAS = "UniPC, Karras times"
PAGE = (ROOT / "docs/results-few-steps.md").read_text(encoding="utf-8")


def shown(title: str, page: str = PAGE) -> dict[tuple[str, int], str]:
    """What the tables of a page that begin with a title say, by row and number of steps."""
    found = {}
    for table in page.split(f"| {title} |")[1:]:
        first, _, *rows = table.split("\n\n")[0].splitlines()
        steps = [int(cell.removeprefix("K =")) for cell in map(str.strip, first.strip(" |").split("|"))]
        for row in rows:
            name, *cells = (cell.strip() for cell in row.strip().removeprefix("|").removesuffix("|").split("|"))
            found |= {(name, K): cell for K, cell in zip(steps, cells, strict=True) if cell}
    return found


def test_every_cell_stands_in_the_page():
    cells = {(c["row"], c["steps"]): f"{c['limit']:.3f} ± {c['standard_error']:.3f}" for c in CELLS}
    assert shown("FD-fashion") == cells
    assert {cell["samples"] for cell in CELLS} == {2000}
    assert "2,000 samples" in PAGE


def test_every_difference_of_bridge_2m_stands_in_the_page():
    gaps = {(peer, K): gap for K, cell in BRIDGE.items() for peer, gap in cell["differences"].items()}
    assert shown("Bridge 2M minus") == {place: words(*gap) for place, gap in gaps.items()}


def test_without_noise_it_is_slightly_better_than_unipc_at_karras_times_in_ten_steps():
    (cell,) = (cell for cell in CELLS if cell["row"] == "Bridge 2M, eta near 0, first step at 160")
    gap, error = cell["differences"][KARRAS]
    assert words(gap, error) in PAGE
    assert gap < -2 * error


@pytest.mark.parametrize("peer", PEERS)
def test_bridge_2m_is_better_than_peers_in_ten_steps(peer):
    """2,000 samples from the same noise; more than two paired standard errors."""
    gap, error = BRIDGE[10]["differences"][peer]
    assert BRIDGE[10]["samples"] == 2000
    assert gap < -2 * error


@pytest.mark.parametrize("steps", [5, 25])
@pytest.mark.parametrize("peer", PEERS)
def test_bridge_2m_is_not_worse_than_peers_in_five_and_25_steps(peer, steps):
    gap, error = BRIDGE[steps]["differences"][peer]
    assert BRIDGE[steps]["samples"] == 2000
    assert gap < 2 * error


def test_in_25_steps_on_cifar10_unipc_is_better_than_the_default():
    known = {(c["settings"]["method"], c["settings"]["steps"]): c["result"] for c in TABLES}
    gap, error = without(known["Bridge 2M", 25], known["UniPC", 25])
    assert f"by {gap:.2f} ± {error:.2f}" in PAGE
    assert gap > 2 * error
    assert known[KARRAS, 25]["limit"] > known[KARRAS, 10]["limit"]


def test_noise_of_the_head_beside_bridge_2m_gains_nothing():
    plain, *others = lines("causes/few-steps-head")
    assert plain["row"] == "Bridge 2M"
    for cell in others:
        share = cell["row"].removeprefix("Bridge 2M, ").removesuffix(" of the head's noise")
        pairs = zip(cell["replicates"], plain["replicates"], strict=True)
        error = jackknife_error([[a - b for a, b in zip(*sides, strict=True)] for sides in pairs if sides[0]])
        gap = cell["limit"] - plain["limit"]
        number = f"{cell['limit']:.3f} ± {cell['standard_error']:.3f}"
        assert f"| {share} | {number} | {words(gap, error)} |" in PAGE
        assert gap > -2 * error


def test_an_eta_for_high_and_one_for_low_noise_gain_nothing():
    """1,000 samples of the same noise; no difference is beyond two paired standard errors."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for cell in lines("few-steps/fashion-eta"):
        if cell["row"] != "Bridge 2M":
            found.setdefault(cell["row"], {})[cell["steps"]] = cell["differences"]["Bridge 2M"]
    assert len(found) == 4
    for row, gaps in found.items():
        above, below = row.removeprefix("Bridge 2M, eta ").removesuffix(" below").split(" above a ratio of 1, ")
        assert f"| {above} | {below} | {words(*gaps[5])} | {words(*gaps[10])} |" in PAGE
        assert all(gap > -2 * error for gap, error in gaps.values())


def test_what_an_extrapolated_mean_lacks_stands_in_the_page():
    steps = [line for line in lines("few-steps/fashion-lacking") if line["steps"] == 10]
    shares = [f"{line['of gamma^2 v']:.2f}".replace("-", "−") for line in steps]
    assert f"| as a share of gamma² v_t | {' | '.join(shares)} |" in PAGE
    assert f"| t | {' | '.join(str(line['t']) for line in steps)} |" in PAGE


def test_on_a_network_that_is_trained_well_the_last_step_should_not_start_later():
    for line in lines("causes/few-steps-last"):
        gap, error = line["last step at 0.15 less 0.05"]
        assert f"by {gap:.3f} ± {error:.3f}" in PAGE
        assert gap > 2 * error


def without(cell: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """The difference of the limits of two distances, and its error by the groups that both left out."""
    pairs = zip(cell["replicates"], other["replicates"], strict=True)
    error = jackknife_error([[a - b for a, b in zip(*sides, strict=True)] for sides in pairs if sides[0]])
    return cell["limit"] - other["limit"], error


def test_what_the_page_says_of_noise_and_of_the_first_thousand_samples_is_measured():
    rows = {(cell["row"], cell["steps"]): cell for cell in CELLS}
    noisy, still = rows["Bridge 2M, first step at 160", 10], rows["Bridge 2M, eta near 0, first step at 160", 10]
    assert f"is {still['limit']:.3f} with eta near 0, and {noisy['limit']:.3f} with eta = 0.3" in PAGE
    assert words(*without(noisy, still)) in PAGE
    assert words(*lines("causes/few-steps-head")[0]["differences"][KARRAS]) in PAGE


def test_by_fid_a_later_last_step_is_better_on_cifar10_and_level_with_peers():
    known = {(cell["settings"]["method"], cell["settings"]["steps"]): cell["result"] for cell in TABLES}
    found = lines("causes/few-steps-fid")
    kernels = [cell["kernel"] for cell in found]

    def row(title: str, values: list[tuple[float, float]]) -> str:
        return f"| {title} | {' | '.join(f'{value:.2f} ± {error:.2f}' for value, error in values)} |"

    assert [(cell["steps"], cell["samples"]) for cell in found] == [(10, 2000), (25, 2000)]
    assert row("FID", [(cell["limit"], cell["standard_error"]) for cell in found]) in PAGE
    assert row("KID", [(1000 * kid["limit"], 1000 * kid["standard_error"]) for kid in kernels]) in PAGE
    peer = [known["UniPC", cell["steps"]]["kernel"] for cell in found]
    assert row("KID of UniPC", [(1000 * kid["value"], 1000 * kid["standard_error"]) for kid in peer]) in PAGE
    for other in ("Bridge 2M", "UniPC", "DPM-Solver++"):
        gaps = [without(cell, known[other, cell["steps"]]) for cell in found]
        shown = " | ".join(words(gap, error, 2).removeprefix("+") for gap, error in gaps)
        assert f"| FID minus {other}'s | {shown} |" in PAGE
        for gap, error in gaps:
            assert gap < (-2 * error if other == "Bridge 2M" else 2 * error)


def test_in_ten_steps_the_solvers_have_reached_what_the_network_of_cifar10_can_do():
    known = {(cell["settings"]["method"], cell["settings"]["steps"]): cell["result"] for cell in TABLES}
    gap, error = without(known["UniPC", 10], known["UniPC", 25])
    assert f"{gap:.1f}" == "0.4"
    assert abs(gap) < error
    assert min(result["limit"] for result in known.values()) > 45.75


@pytest.mark.parametrize("peer", PEERS)
def test_by_fid_and_kid_bridge_2m_is_better_than_peers_on_cifar10_in_five_steps(peer):
    known = {cell["settings"]["method"]: cell["result"] for cell in TABLES if cell["settings"]["steps"] == 5}
    ours, theirs = known["Bridge 2M"], known[peer]
    gap, error = without(ours, theirs)
    assert gap < -5 * error
    assert ours["kernel"]["value"] < theirs["kernel"]["value"] - 3 * theirs["kernel"]["standard_error"]
