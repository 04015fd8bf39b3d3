"""What docs/restoration.md says is what was measured: its lines are in measurements/restoration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from restoration_tables import BASELINES as BASES
from restoration_tables import OURS, Comparison

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/restoration.md").read_text(encoding="utf-8")
EXACT, *MIXTURE = (
    json.loads(line) for line in (ROOT / "measurements/restoration/mixture.jsonl").read_text().splitlines()
)
BASELINES = ("PiGDM", "DPS, strength 1", "DiffPIR, strength 10")


def test_every_row_of_the_mixture_stands_in_the_page():
    for line in MIXTURE:
        shares = " | ".join(f"{line[f'coverage {level}'][0]:.3f}" for level in (0.5, 0.9))
        distances = ", ".join(f"{distance:.2f}" for distance in line["distances"])
        assert f"| {line['row']} | {shares} | {line['bias']:.2f} | {line['spread']:.2f} | {distances} |" in PAGE
    assert ", ".join(f"{distance:.2f}" for distance in EXACT["distances"]) in PAGE


def test_every_covariance_covers_90_percent_within_three_points():
    for line in MIXTURE:
        if line["row"] not in BASELINES:
            share, error = line["coverage 0.9"]
            assert abs(share - 0.9) + 2 * error < 0.03


FASHION = Comparison.of(ROOT / "measurements/restoration/fashion.jsonl")


@pytest.mark.parametrize("task", FASHION.scores)
def test_guidance_by_our_covariances_has_a_higher_psnr_and_better_intervals_than_both_baselines(task):
    """Mean differences over the images that were restored so far; docs/restoration.md has their errors."""
    for ours in OURS:
        assert abs(float(FASHION.scores[task][ours]["cover90"].mean()) - 0.9) < 0.03
        for other in BASES:
            assert FASHION.gain(task, ours, other)[0] > 0
            assert FASHION.nearer(task, ours, other)[0] > 0
            assert float(FASHION.scores[task][other]["cover90"].mean()) < 0.80
