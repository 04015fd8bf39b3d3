"""What docs/covariances.md says of the two forms of SN is what was measured: its lines are in measurements/sn-forms."""

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
    for first, last in ((0, 0.5), (0.6, 1)):
        ratios = [line["positive"]["ratio"] for line in lines if first <= line["t"] <= last]
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in PAGE
