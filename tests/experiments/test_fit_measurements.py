"""What `benchmarks/fit_windows.py` measured holds, and the page says it."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "measurements" / "fit-windows.jsonl").read_text(encoding="utf-8").splitlines()


def test_a_head_that_was_fitted_on_windows_is_as_calibrated_as_one_of_whole_images():
    found = {line["room in MB"]: line["ratio"] for line in map(json.loads, LINES)}
    assert sorted(found) == [32, 128, 2048]  # the least holds a fourteenth of the features, the largest all
    for ratios in found.values():
        assert len(ratios) == 10
        assert all(0.85 <= ratio <= 1.15 for ratio in ratios)
        assert abs(sum(ratios) / 10 - 1) <= 0.03


def test_the_page_says_what_was_measured():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").splitlines()
    for line in map(json.loads, LINES):
        ratios = line["ratio"]
        spread, mean = f"{min(ratios):.2f} to {max(ratios):.2f}", f"{sum(ratios) / 10:.2f}"
        assert f"| {line['room in MB']:,} MB | {spread} | {mean} |" in page
