"""What docs/clipping.md says is what was measured: its lines are in measurements/clipping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clipping.md").read_text(encoding="utf-8")
ROWS = {  # of measurements/clipping/steps.jsonl: what the page calls them
    "NPR": "NPR-DDIM, the paper's way",
    "no noise, not clipped": "DDIM, not clipped",
    "NPR, not clipped": "NPR-DDIM, not clipped",
    "NPR above 3": "noise above a ratio of 3 only",
    "NPR from 0.3 to 3": "noise from 0.3 to 3 only",
    "NPR below 0.3": "noise below 0.3 only",
    "half of NPR": "half of the variance",
}


def lines(name: str) -> list[dict[str, Any]]:
    """The lines of a file of measurements."""
    return [json.loads(line) for line in (ROOT / f"measurements/clipping/{name}.jsonl").read_text().splitlines()]


LINES = lines("fashion")
STEPS = {(line["row"], line["steps"]): line for line in lines("steps")}


def signed(gap: float, error: float) -> str:
    """A difference with its error, as the page writes it."""
    return f"{'−' if gap < 0 else '+'}{abs(gap):.3f} ± {error:.3f}"


def words(cell: dict[str, Any] | None) -> str:
    """A difference as the page says it."""
    if cell is None:
        return "as the paper's"
    return signed(cell["difference"], cell["paired_error"])


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["method"])
def test_the_page_says_what_was_measured(line: dict[str, Any]) -> None:
    paper = f"{line['paper']['distance']:.3f} ± {line['paper']['standard_error']:.3f}"
    gaps = [words(line.get(way)) for way in ("re-derived", "not clipped")]
    assert f"| {line['method']} | {paper} | {gaps[0]} | {gaps[1]} |" in PAGE


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["method"])
def test_images_are_better_if_the_mean_is_not_clipped(line: dict[str, Any]) -> None:
    assert line["not clipped"]["difference"] < -5 * line["not clipped"]["paired_error"]


@pytest.mark.parametrize("row", ROWS)
def test_the_page_says_what_was_measured_in_more_steps(row: str) -> None:
    found = [STEPS.get((row, K)) for K in (25, 50)]
    cells = ["" if line is None else signed(line["difference"], line["standard_error"]) for line in found]
    assert f"| {ROWS[row]} | {' | '.join(cells)} |" in PAGE


def test_clipping_costs_ddim_more_in_more_steps() -> None:
    plain = [f"{STEPS['no noise', K]['limit']:.3f}" for K in (25, 50)]
    assert f"| DDIM, the paper's way | {' | '.join(plain)} |" in PAGE
    few, many = (STEPS["no noise, not clipped", K] for K in (25, 50))
    for line in (few, many):
        assert line["difference"] < -5 * line["standard_error"]
    assert many["difference"] < few["difference"] - 3 * (few["standard_error"] + many["standard_error"])


def test_in_fifty_steps_no_part_of_the_noise_of_npr_lowers_the_distance() -> None:
    parts = [line for (row, K), line in STEPS.items() if K == 50 and "not clipped" not in row and row != "no noise"]
    assert len(parts) == 5
    for line in parts:
        assert line["difference"] > -2 * line["standard_error"]
    assert STEPS["NPR", 50]["difference"] > 3 * STEPS["NPR", 50]["standard_error"]
