"""What docs/few-steps.md says is what was measured: its cells are in measurements/few-steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELLS = [json.loads(line) for line in (ROOT / "measurements/few-steps/fashion.jsonl").read_text().splitlines()]
BRIDGE = {cell["steps"]: cell for cell in CELLS if cell["row"] == "Bridge 2M"}
PEERS = ("UniPC", "DPM-Solver++")


def test_every_cell_stands_in_the_page():
    page = (ROOT / "docs/few-steps.md").read_text()
    for cell in CELLS:
        number = f"{cell['limit']:.3f} ± {cell['standard_error']:.3f}"
        assert f"| {cell['row']} | {cell['samples']:,} | {number} |" in page


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
