"""What was measured of the covariances on test images: benchmarks/covariances.py, measurements/covariances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MEASURED = Path(__file__).parents[2] / "measurements" / "covariances"
LINES = [
    {"file": path.stem, **json.loads(line)}
    for path in sorted(MEASURED.glob("*.jsonl"))
    for line in path.read_text().splitlines()
]
EACH = pytest.mark.parametrize("found", LINES, ids=lambda line: f"{line['file']}, K = {line['steps']}")


PAGE = (Path(__file__).parents[2] / "docs/covariances.md").read_text(encoding="utf-8")
ROWS = {
    "beta": "beta",
    "analytic": "one variance per timestep (A)",
    "spectral": "spectral, no head",
    "ocm": "OCM",
    "sn": "SN",
    "npr": "NPR",
    "sn_correlated": "correlated SN",
    "npr_correlated": "correlated NPR",
}


@pytest.mark.parametrize("bundle", ["fashion", "cifar10"])
def test_the_tables_of_the_page_are_what_was_measured(bundle: str) -> None:
    """In the order of the page: first those of fashion, then those of cifar10."""
    tables = PAGE.split("| covariance | K = 10 |")[1:]
    shown = tables[["fashion", "cifar10"].index(bundle)].replace("**", "").split("\n\n")[0].splitlines()[2:]
    found = {line["steps"]: line for line in LINES if line["file"] == bundle}
    wanted = set()
    for name in set(found[10]["bits/dim"]) & set(ROWS):
        cells = []
        for K in (10, 25):
            gap = found[K]["less npr"].get(name)
            sign = "" if gap is None else "−" if gap["mean"] < 0 else "+"
            bits = found[K]["bits/dim"][name]["mean"]
            cells += [f"{bits:.3f}", gap and f"{sign}{abs(gap['mean']):.3f} ± {gap['standard_error']:.3f}"]
        wanted.add(f"| {ROWS[name]} | {' | '.join(cell or '' for cell in cells)} |".replace("|  |", "| |"))
    assert set(shown) == wanted


def test_both_numbers_of_steps_were_measured():
    assert {(line["bundle"], line["steps"]) for line in LINES} >= {("fashion", 10), ("fashion", 25)}


@EACH
def test_npr_needs_fewer_bits_than_one_number_per_time_and_that_fewer_than_beta(found: dict[str, Any]) -> None:
    assert found["less analytic"]["npr"]["z"] < -3
    assert found["less analytic"]["beta"]["z"] > 3


@EACH
def test_positive_sn_is_near_npr_far_below_one_number_and_never_clamped_below(found: dict[str, Any]) -> None:
    assert found["less npr"]["sn"]["mean"] < 0.15
    assert found["less analytic"]["sn"]["z"] < -5
    assert found["clamped below and above"]["sn"] == [0.0, 0.0]


@EACH
def test_correlations_save_a_tenth_of_a_bit_in_ten_steps_and_less_in_more(found: dict[str, Any]) -> None:
    gain = found["less npr"]["npr_correlated"]
    assert gain["mean"] <= (-0.10 if found["steps"] == 10 else -0.05)
    assert gain["z"] < -5


def test_hidden_layers_save_a_tenth_of_a_bit():
    (found,) = (line for line in LINES if (line["file"], line["steps"]) == ("fashion", 10))
    gain = found["less that of the other bundle"]["npr"]
    assert gain["mean"] < -0.10
    assert gain["z"] < -5


def test_the_bound_of_fashion_is_at_most_3_90():
    """By more than three standard errors, on 2,048 test images besides the 512 of the page's other lines."""
    (found,) = (line for line in LINES if line["file"] == "fashion-2048")
    bits, gain = found["bits/dim"]["npr"], found["less npr"]["npr_correlated"]
    assert (found["images"], found["steps"]) == (2048, 10)
    assert bits["mean"] < 3.90 - 3 * bits["standard_error"]
    shown = f"{bits['mean']:.3f} ± {bits['standard_error']:.3f}"
    assert f"| {shown} | −{-gain['mean']:.3f} ± {gain['standard_error']:.3f} | |" in PAGE
