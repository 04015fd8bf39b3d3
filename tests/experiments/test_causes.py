"""What docs/covariances.md says of causes is what was measured: its lines are in measurements/causes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from optcov.metrics.frechet import jackknife_error

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/covariances.md").read_text(encoding="utf-8")
ROWS = {
    "colours": "between colours alone",
    "positions": "between positions alone",
    "fast": "both",
    "exact": "both, as a dense matrix",
}


def lines(name: str) -> list[dict[str, Any]]:
    """The lines of a file of causes."""
    return [json.loads(line) for line in (ROOT / f"measurements/causes/{name}.jsonl").read_text().splitlines()]


CORRELATED = {(line["bundle"], line["steps"]): line for line in lines("correlated-parts")}
SN = {line["row"]: line for line in lines("sn-parts")}
IMAGES = {(line["row"], line["steps"]): line for line in lines("image-parts")}


def row_of_page(start: str) -> list[str]:
    """The cells of the row that begins so, without bold letters."""
    (row,) = (line for line in PAGE.replace("**", "").splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in row.strip("| ").split("|")]


@pytest.mark.parametrize("part", ROWS)
def test_the_parts_of_the_gain_of_correlations_stand_in_the_page(part):
    places = [("cifar10", 10), ("cifar10", 25), ("fashion", 10), ("fashion", 25)]
    wanted = [CORRELATED[place].get(f"{part} less npr") for place in places]
    words = ["" if gap is None else f"−{-gap['mean']:.3f} ± {gap['standard_error']:.3f}" for gap in wanted]
    assert [*row_of_page(ROWS[part])[1:], "", ""][:4] == words


def test_colours_and_positions_both_gain_and_together_more_than_their_sum():
    for K in (10, 25):
        line = CORRELATED["cifar10", K]
        gains = {part: line[f"{part} less npr"]["mean"] for part in ("colours", "positions", "fast")}
        for part in ("colours", "positions"):
            assert gains[part] < -5 * line[f"{part} less npr"]["standard_error"]
        assert gains["fast"] < gains["colours"] + gains["positions"]


def test_the_gain_of_correlations_does_not_shrink_with_training():
    """On CIFAR-10; each gain is at least the one before, but for two standard errors."""
    for K in (10, 25):
        own = [line for line in lines("correlated-training") if line["steps"] == K]
        gains = [line["npr_correlated less npr"] for line in own]
        assert len(own) >= 3
        for before, after in pairwise(gains):
            assert after["mean"] < before["mean"] + 2 * after["standard_error"]
        if K == 10:
            for line, gain in zip(own, gains, strict=True):
                assert f"{-gain['mean']:.2f} after {line['epochs']}" in " ".join(PAGE.split())


def test_even_the_dense_form_gains_less_than_a_tenth_of_a_bit_on_fashion_in_25_steps():
    gap = CORRELATED["fashion", 25]["exact less npr"]
    assert gap["mean"] - 2 * gap["standard_error"] > -0.10
    assert CORRELATED["fashion", 25]["share of lam2"] > 0.95


@pytest.mark.parametrize(
    ("measured", "start"),
    [("SN", "SN | SN"), ("SN's level, NPR's pattern", "SN | NPR"), ("NPR's level, SN's pattern", "NPR | SN")],
)
def test_level_and_pattern_of_sn_both_cost_a_little(measured, start):
    gap, error = SN[measured]["difference"], SN[measured]["standard_error"]
    assert row_of_page(start)[-1] == f"+{gap:.4f} ± {error:.4f}"
    assert gap > 3 * error


@pytest.mark.parametrize("bundle", ["fashion", "cifar10"])
def test_the_trace_of_the_jacobian_is_the_squared_error_at_low_noise_and_negative_at_high(bundle):
    own = [line for line in lines("ocm-trace") if line["bundle"] == bundle]
    errors = [f"{line['squared error']:.3f}" for line in own]
    assert row_of_page(f"squared error, `{bundle}`")[1:] == errors
    traces = [f"{line['trace'][0]:.3f}".replace("-", "−") for line in own]
    assert row_of_page(f"(b² / a) trace / d, `{bundle}`")[1:] == traces
    for line in own:
        trace, error = line["trace"]
        if line["t"] <= 0.6:
            assert abs(trace / line["squared error"] - 1) < 0.2
        elif line["t"] >= 0.9:
            assert trace < -5 * error


def test_sn_is_level_with_npr_and_better_than_one_number_on_a_weaker_network():
    rows = {line["settings"]["method"]: line["result"] for line in lines("sn-weaker-network")}
    for other, start in (("NPR-DDPM", 1), ("A-DDPM", 2)):
        pairs = zip(rows["SN-DDPM"]["replicates"][0], rows[other]["replicates"][0], strict=True)
        error = jackknife_error([[one - two for one, two in pairs]])
        gap = rows["SN-DDPM"]["limit"] - rows[other]["limit"]
        words = f"{gap:+.3f} ± {error:.3f}".replace("-", "−")
        assert row_of_page("`fashion` of version 0.1, the weakest")[start + 1] == words
        assert (abs(gap) < 2 * error) if other == "NPR-DDPM" else (gap < -5 * error)


@pytest.mark.parametrize(
    ("row", "start"),
    [
        ("NPR-DDPM", "NPR-DDPM"),
        ("CNPR-DDPM above a ratio of 3", "correlated at high noise only"),
        ("CNPR-DDPM below a ratio of 3", "correlated at low noise only"),
        ("CNPR-DDPM", "CNPR-DDPM"),
    ],
)
def test_the_page_says_where_correlations_help_images(row, start):
    line = IMAGES[row, 10]
    gaps = [line["differences"].get("NPR-DDPM"), line["kernel"]["differences"].get("NPR-DDPM")]
    words = [
        "" if gap is None else f"{scale * gap[0]:+.1f} ± {scale * gap[1]:.1f}".replace("-", "−")
        for gap, scale in zip(gaps, (1, 1000), strict=True)
    ]
    assert [*words, *(f"{line['power'][ring]:.2f}" for ring in (0, 3, 6))] == row_of_page(start)[1:]


def test_correlations_help_images_at_high_noise_and_hurt_them_at_low():
    """By KID, by more than three standard errors."""
    for row, sign in (("CNPR-DDPM above a ratio of 3", -1), ("CNPR-DDPM below a ratio of 3", 1)):
        gap, error = IMAGES[row, 10]["kernel"]["differences"]["NPR-DDPM"]
        assert sign * gap > 3 * error
