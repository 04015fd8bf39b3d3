"""The numbers of docs/results.md are those of the committed cells, and the cells belong to the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optcov import bundle
from optcov.tables import SIZES, Evaluation, TableImages

ROOT = Path(__file__).parent.parent
RESULTS = (ROOT / "docs" / "results.md").read_text().splitlines()
CELLS = [json.loads(path.read_text()) for path in sorted((ROOT / "measurements" / "fashion" / "cells").glob("*.json"))]
REPORTED = [cell for cell in CELLS if cell["kind"] == "distance" and cell["settings"]["steps"] in (10, 25)]


def test_the_cells_are_measured_on_the_embedded_model() -> None:
    evaluation = Evaluation(bundle.load("fashion"), TableImages.load(None, "fashion"), None, SIZES["quick"])
    assert {cell["settings"]["model"] for cell in CELLS} == {evaluation.identity}


@pytest.mark.parametrize("cell", REPORTED, ids=lambda cell: cell["label"])
def test_a_measured_distance_stands_in_the_results(cell: dict[str, Any]) -> None:
    result, settings = cell["result"], cell["settings"]
    number = f"{result['limit']:.2f} ± {result['standard_error']:.2f}"
    rows = [line for line in RESULTS if line.startswith(f"| {settings['method']} |")]
    assert any(number in row for row in rows), f"{cell['label']}: {number} is not in docs/results.md"


def test_measured_bits_stand_in_the_results() -> None:
    (cell,) = (cell for cell in CELLS if cell["kind"] == "likelihood")
    for row in cell["result"]["rows"]:
        if row["K"] in (10, 25, 50, 100):
            estimate = row["bits_per_dim"]
            number = f"{estimate['mean']:.3f} ± {estimate['standard_error']:.3f}"
            assert any(line.startswith(f"| {row['kind']} ") and number in line for line in RESULTS), (
                row["design"],
                number,
            )
