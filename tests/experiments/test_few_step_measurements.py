"""What docs/few-steps.md says is what was measured: its cells are in measurements/few-steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CELLS = [json.loads(line) for line in (ROOT / "measurements/few-steps/fashion.jsonl").read_text().splitlines()]
BRIDGE = {cell["steps"]: cell for cell in CELLS if cell["row"] == "Bridge 2M"}
PEERS = ("UniPC", "DPM-Solver++")
KARRAS = "UniPC, Karras times"
PAGE = (ROOT / "docs/few-steps.md").read_text(encoding="utf-8")


def shown(title: str) -> dict[tuple[str, int], str]:
    """What the tables of the page that begin with a title say, by row and number of steps."""
    found = {}
    for table in PAGE.split(f"| {title} |")[1:]:
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
    words = {place: f"{gap:+.3f} ± {error:.3f}".replace("-", "−") for place, (gap, error) in gaps.items()}
    assert shown("Bridge 2M minus") == words


def test_without_noise_it_is_slightly_better_than_unipc_at_karras_times_in_ten_steps():
    (cell,) = (cell for cell in CELLS if cell["row"] == "Bridge 2M, eta near 0, first step at 160")
    gap, error = cell["differences"][KARRAS]
    assert f"{gap:+.3f} ± {error:.3f}".replace("-", "−") in PAGE
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


def test_bridge_2m_is_better_than_all_peers_on_cifar10_in_ten_steps():
    """2,000 samples from the same noise; more than two paired standard errors."""
    lines = (ROOT / "measurements/few-steps/cifar10.jsonl").read_text().splitlines()
    cells = {cell["row"]: cell for cell in map(json.loads, lines)}
    for peer in (*PEERS, KARRAS):
        gap, error = cells["Bridge 2M"]["differences"][peer]
        assert gap < -2 * error
        number, less = f"{cells[peer]['limit']:.1f} ± {cells[peer]['standard_error']:.1f}", f"−{-gap:.1f} ± {error:.1f}"
        assert f"| {peer} | {number} | {less} |" in PAGE
    assert {cell["samples"] for cell in cells.values()} == {2000}
