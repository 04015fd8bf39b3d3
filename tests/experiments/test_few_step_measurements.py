"""What docs/results-few-steps.md says is what was measured, in measurements/few-steps."""

from __future__ import annotations

import json
import math
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


def test_more_training_mends_steps_at_little_noise_on_cifar10():
    before, after = lines("training/cifar10-epochs")
    rows = {
        "UniPC, Karras times: 25 steps minus ten": ("25 steps less 10", KARRAS),
        "Bridge 2M: 25 steps minus ten": ("25 steps less 10", "Bridge 2M"),
        "Bridge 2M minus UniPC, in ten steps": ("Bridge 2M less UniPC", "10"),
        "Bridge 2M minus UniPC, in 25 steps": ("Bridge 2M less UniPC", "25"),
        "Bridge 2M, last step at 0.15 instead of 0.05, in ten steps": ("last step at 0.15 less 0.05", "10"),
        "Bridge 2M, last step at 0.15 instead of 0.05, in 25 steps": ("last step at 0.15 less 0.05", "25"),
    }
    for title, (name, key) in rows.items():
        assert f"| {title} | {words(*before[name][key], 2)} | {words(*after[name][key], 2)} |" in PAGE
    assert after["25 steps less 10"][KARRAS][0] + 5 * 0.4 < before["25 steps less 10"][KARRAS][0]
    gap, error = before["Bridge 2M less UniPC"]["25"]
    assert gap > 2 * error
    for gap, error in after["Bridge 2M less UniPC"].values():
        assert abs(gap) < 2 * error


def test_the_differences_after_all_training_are_those_of_the_tables():
    known = {(cell["settings"]["method"], cell["settings"]["steps"]): cell["result"] for cell in TABLES}
    (_, after), late = lines("training/cifar10-epochs"), {c["steps"]: c for c in lines("causes/few-steps-fid")}
    for K in (10, 25):
        assert {late[K]["samples"], known["Bridge 2M", K]["samples"]} == {2000}
        for name, gap in (
            ("Bridge 2M less UniPC", without(known["Bridge 2M", K], known["UniPC", K])),
            ("last step at 0.15 less 0.05", without(late[K], known["Bridge 2M", K])),
        ):
            assert after[name][str(K)] == pytest.approx(gap, abs=0.006)
    for name, gap in after["25 steps less 10"].items():
        assert gap == pytest.approx(without(known[name, 25], known[name, 10]), abs=0.006)


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


def test_in_five_steps_on_cifar10_bridge_2m_is_better_by_fid_and_unipc_by_kid():
    known = {cell["settings"]["method"]: cell["result"] for cell in TABLES if cell["settings"]["steps"] == 5}
    ours, unipc, dpm = (known[name] for name in ("Bridge 2M", "UniPC", "DPM-Solver++"))
    for theirs in (unipc, dpm):
        gap, error = without(ours, theirs)
        assert gap < -5 * error
    said = f"than UniPC ({ours['limit']:.0f} and {unipc['limit']:.0f}) and DPM-Solver++ ({dpm['limit']:.0f})"
    assert said in " ".join(PAGE.split())
    kernels = [(1000 * cell["kernel"]["value"], 1000 * cell["kernel"]["standard_error"]) for cell in (ours, unipc, dpm)]
    (mine, error), (best, of_best), (other, of_other) = kernels
    assert mine - best > 3 * math.hypot(error, of_best)
    assert abs(mine - other) < 2 * math.hypot(error, of_other)


def test_the_page_says_which_part_of_fid_differs_in_five_steps():
    cells = {line["row"]: line for line in lines("causes/image-parts") if line["steps"] == 5}
    rest = {}
    for row in ("UniPC", "Bridge 2M"):
        line, means = cells[row], cells[row]["means"]
        rest[row] = line["limit"] - means["limit"]
        kernel = [1000 * line["kernel"][key] for key in ("limit", "standard_error")]
        numbers = [
            f"{line['limit']:.1f} ± {line['standard_error']:.1f}",
            f"{means['limit']:.1f} ± {means['standard_error']:.1f}",
            f"{rest[row]:.1f}",
            f"{kernel[0]:.1f} ± {kernel[1]:.1f}",
            *(f"{line['power'][ring]:.2f}" for ring in (3, 6)),
        ]
        assert f"| {row} | {' | '.join(numbers)} |" in PAGE
    one, other = (cells[row]["means"] for row in ("UniPC", "Bridge 2M"))
    assert abs(one["limit"] - other["limit"]) < 2 * math.hypot(one["standard_error"], other["standard_error"])
    assert rest["Bridge 2M"] < rest["UniPC"] - 5
