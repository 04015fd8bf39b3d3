"""What docs/results-restoration.md and docs/restoration.md say is what was measured, in measurements/restoration."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from restoration_tables import BASELINES, OURS, TASKS, Comparison, page_part, whole_groups

from optcov import bundle

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "measurements/restoration"
PAGE = (ROOT / "docs/results-restoration.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs/restoration.md").read_text(encoding="utf-8")
MODELS = ("fashion", "cifar10")
FOUND = {model: Comparison.of(MEASURED / f"{model}.jsonl") for model in MODELS}
EXACT, *MIXTURE = (json.loads(line) for line in (MEASURED / "mixture.jsonl").read_text().splitlines())
OTHERS_ON_THE_MIXTURE = ("PiGDM", "DPS, strength 1", "DiffPIR, strength 10")


def test_every_row_of_the_mixture_stands_in_the_page():
    for line in MIXTURE:
        shares = " | ".join(f"{line[f'coverage {level}'][0]:.3f}" for level in (0.5, 0.9))
        distances = ", ".join(f"{distance:.2f}" for distance in line["distances"])
        assert f"| {line['row']} | {shares} | {line['bias']:.2f} | {line['spread']:.2f} | {distances} |" in PAGE
    assert ", ".join(f"{distance:.2f}" for distance in EXACT["distances"]) in PAGE


def test_the_guide_has_the_psnr_of_the_page():
    found, ours = FOUND["fashion"], "CNPR, proximal"
    for task in TASKS:
        for other in (ours, *BASELINES, "DiffPIR"):
            assert found.gain(task, "NPR, guidance", other)[0] > 0
    losses = [found.gain(task, "NPR, guidance", ours)[0] for task in TASKS]
    assert f"is {min(losses):.1f} to {max(losses):.1f} dB lower" in GUIDE
    rows = [row.removesuffix(" |").split(" | ") for row in page_part(found).splitlines() if " | 15 + " in row]
    times = {row[0].removeprefix("| "): float(row[-1]) for row in rows}
    assert abs(times[ours] / times["NPR, guidance"] - 0.5) < 0.1  # "half the time"


def test_every_strength_that_was_chosen_stands_in_the_page():
    for model in MODELS:
        chosen: dict[str, dict[str, set[float]]] = {}
        for line in whole_groups([json.loads(each) for each in (MEASURED / f"{model}.jsonl").read_text().splitlines()]):
            if line["strength"] is not None:
                chosen.setdefault(line["method"], {}).setdefault(line["task"], set()).add(line["strength"])
        assert len(chosen) >= 2
        for method, tasks in chosen.items():
            row = next(row for row in PAGE.splitlines() if row.startswith(f"| {method}, `{model}` |"))
            assert row.removesuffix(" |").split(" | ")[2:] == [f"{one:g}" for task in TASKS for one in tasks[task]]


def test_every_covariance_covers_90_percent_of_the_mixture_within_three_points():
    for line in MIXTURE:
        if line["row"] not in OTHERS_ON_THE_MIXTURE:
            share, error = line["coverage 0.9"]
            assert abs(share - 0.9) + 2 * error < 0.03


@pytest.mark.parametrize("model", MODELS)
def test_the_lines_are_of_the_embedded_model_on_64_images_and_every_system_was_solved(model):
    lines = [json.loads(line) for line in (MEASURED / f"{model}.jsonl").read_text().splitlines()]
    assert {line["model"] for line in lines} == {bundle.load(model).digest()[:12]}
    assert {line["unsolved"] for line in lines} <= {0, None}  # azula does not say it
    assert FOUND[model].images == 64


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", MODELS)
def test_guidance_by_npr_has_at_least_the_psnr_of_both_baselines(model, task):
    for other in BASELINES:
        gain, error = FOUND[model].gain(task, "NPR, guidance", other)
        assert gain > 2.5 * error


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("model", MODELS)
def test_intervals_by_our_covariances_are_better_than_those_of_both_baselines(model, ours):
    """With z > 3 on at least three of four tasks."""
    for other in BASELINES:
        z = [gain / error for gain, error in (FOUND[model].nearer(task, ours, other) for task in TASKS)]
        assert sum(each > 3 for each in z) >= 3


def test_the_gradient_at_high_noise_spoils_guidance_by_a_correlated_covariance():
    path = ROOT / "measurements/causes/restoration-jacobian.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["model"] for line in lines} == {bundle.load("cifar10").digest()[:12]}
    found = {(line["method"], line["gradients up to"]): line for line in lines}
    some, all_of_them = (found["CNPR-DDPM", limit] for limit in (0.55, 1.0))
    psnr, cover = ([mean(line[score]) for line in (some, all_of_them)] for score in ("psnr", "cover90"))
    words = " ".join(PAGE.split())
    assert f"the PSNR is {psnr[0]:.2f} instead of {psnr[1]:.2f}" in words
    assert f"the coverage {cover[0]:.3f} instead of {cover[1]:.3f}" in words
