"""What docs/training.md says of other ways to train is what benchmarks/training_choices.py measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
LINES = [json.loads(line) for line in (ROOT / "measurements/training/choices.jsonl").read_text().splitlines()]


def test_each_choice_stands_in_the_page():
    for line in LINES:
        gap = f"{line['from the first']:+.3f} ± {line['standard error']:.3f}".replace("-", "−")
        cells = [line["choice"], f"{line['CPU minutes']:.1f}", f"{line['loss']:.3f}", f"{line['bits/dim']:.3f}"]
        assert f"| {' | '.join([*cells, '' if line is LINES[0] else gap])} |".replace("|  |", "| |") in PAGE


def test_they_took_about_the_same_time_and_the_one_that_was_taken_is_the_best():
    times = [line["CPU minutes"] for line in LINES]
    assert len(LINES) >= 4
    assert max(times) < 1.25 * min(times)
    assert all(line["from the first"] > 2 * line["standard error"] for line in LINES[1:])
