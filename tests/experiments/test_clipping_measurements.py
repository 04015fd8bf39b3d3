"""What docs/clipping.md says is what was measured: its lines are in measurements/clipping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clipping.md").read_text(encoding="utf-8")
LINES = [json.loads(line) for line in (ROOT / "measurements/clipping/fashion.jsonl").read_text().splitlines()]


def words(cell: dict[str, Any] | None) -> str:
    """A difference as the page says it."""
    if cell is None:
        return "as the paper's"
    gap = cell["difference"]
    return f"{'−' if gap < 0 else '+'}{abs(gap):.3f} ± {cell['paired_error']:.3f}"


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["method"])
def test_the_page_says_what_was_measured(line: dict[str, Any]) -> None:
    paper = f"{line['paper']['distance']:.3f} ± {line['paper']['standard_error']:.3f}"
    gaps = [words(line.get(way)) for way in ("re-derived", "not clipped")]
    assert f"| {line['method']} | {paper} | {gaps[0]} | {gaps[1]} |" in PAGE


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["method"])
def test_images_are_better_if_the_mean_is_not_clipped(line: dict[str, Any]) -> None:
    assert line["not clipped"]["difference"] < -5 * line["not clipped"]["paired_error"]
