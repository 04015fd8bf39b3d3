"""What `benchmarks/classes.py` measured on class-conditional models holds, and the page says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "classes-and-guidance.md"
MODELS = {"U-Net": "fashion", "flow DiT": "flow-dit"}


def measured(name):
    return json.loads((ROOT / "measurements" / "classes" / f"{name}.jsonl").read_text(encoding="utf-8"))


def percent(found):
    return f"{100 * found['mean']:.0f} ± {100 * found['standard_error']:.0f} %"


def rows(label, found):
    told, better, ratios = found["class less no class"], found["NPR less A"], found["calibration by decile"]["npr"]
    by_npr, by_a = found["classes by NPR"]["accuracy"], found["classes by A"]["accuracy"]
    bits = (
        f"{found['NPR given the class']:.2f}",
        f"{told['difference']:+.3f} ± {told['standard_error']:.3f}",
        f"{better['difference']:+.2f} ± {better['standard_error']:.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    )
    accuracy = (percent(by_npr["1"]), percent(by_npr["4"]), percent(by_a["1"]))
    return ["| " + " | ".join((label, *cells)) + " |" for cells in (bits, accuracy)]


@pytest.mark.parametrize("label", MODELS)
def test_a_label_and_a_head_tighten_the_bound_and_the_head_is_calibrated(label):
    found = measured(MODELS[label])
    assert found["images"] >= 200
    assert found["class less no class"]["z"] < -3
    assert found["NPR less A"]["z"] < -3
    assert len(found["calibration by decile"]["npr"]) == 10
    assert all(0.85 <= ratio <= 1.15 for ratio in found["calibration by decile"]["npr"])


def test_the_classifier_of_the_embedded_model_is_right_for_four_images_of_five():
    assert measured("fashion")["classes by A"]["accuracy"]["1"]["mean"] >= 0.8


@pytest.mark.parametrize("label", MODELS)
def test_the_page_says_what_was_measured(label):
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for row in rows(label, measured(MODELS[label])):
        assert row in page
