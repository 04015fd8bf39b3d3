"""What docs/covariances.md says of the forms of SN is what was measured: its lines are in measurements/sn-forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/covariances.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("bundle", ["fashion", "cifar10"])
def test_the_positive_form_is_never_negative_and_right_while_the_linear_one_is_neither(bundle):
    lines = [json.loads(line) for line in (ROOT / f"measurements/sn-forms/{bundle}.jsonl").read_text().splitlines()]
    below = [line["linear"]["below"] for line in lines]
    assert f"{min(below) * 100:.0f} to {max(below) * 100:.0f} %" in PAGE
    assert all(line["positive"]["below"] == 0 for line in lines)
    assert all(0.8 < line["positive"]["ratio"] < 1.6 for line in lines)
    assert all(line["linear"]["ratio"] > 2 for line in lines)
    for form in ("positive", "positive, noise units"):
        for first, last in ((0, 0.5), (0.6, 1)):
            ratios = [line[form]["ratio"] for line in lines if first <= line["t"] <= last]
            assert f"{min(ratios):.2f} to {max(ratios):.2f}" in PAGE


@pytest.mark.parametrize(("bundle", "first"), [("fashion", 0.4), ("cifar10", 0.02)])
def test_velocity_units_cost_less_where_the_page_says_so_and_hardly_more_elsewhere(bundle, first):
    for line in (
        json.loads(text) for text in (ROOT / f"measurements/sn-forms/{bundle}.jsonl").read_text().splitlines()
    ):
        more = line["positive, noise units"]["cost"] / line["positive"]["cost"] - 1
        assert -0.001 < more < 0.0022
        assert more > 0 or line["t"] < first
        if line["t"] == 0.9:
            assert line["positive, noise units"]["ratio"] < 0.5
