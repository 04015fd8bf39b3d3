"""README and the page of results say what the measured cells say."""

from __future__ import annotations

import json

import pytest
from results_page import (
    CLAIMS,
    MEASURED,
    PAGE,
    PAPER,
    PLOT,
    README,
    RESTORATION,
    Measured,
    bit_differences,
    inserted,
    models,
    pages,
    parts,
)

from optcov import bundle
from optcov.experiments.tables.claims import row_differences
from optcov.experiments.tables.evaluation import model_identity


@pytest.mark.parametrize("path", [PAGE, CLAIMS, README, RESTORATION], ids=lambda path: path.name)
def test_each_page_has_the_numbers_of_the_cells(path):
    assert pages()[path] == path.read_text(encoding="utf-8"), "run python scripts/results_page.py"


@pytest.mark.parametrize("model", models())
def test_the_cells_are_of_the_embedded_model(model):
    identity = model_identity(bundle.load(model))
    cells = [json.loads(line) for path in (MEASURED / model).glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {cell["settings"]["model"] for cell in cells} == {identity}


@pytest.mark.parametrize("model", models())
def test_each_model_has_its_numbers_and_verdicts_on_the_page(model):
    page, made = PAGE.read_text("utf-8") + CLAIMS.read_text("utf-8"), parts([model])
    assert len(made) == {"fashion": 4, "cifar10": 5}[model]
    for part in made.values():
        assert part in page


@pytest.mark.parametrize("model", models())
@pytest.mark.parametrize("better", ["SN-DDPM", "NPR-DDPM"])
def test_both_heads_draw_better_images_than_one_variance_per_timestep_in_ten_steps(model, better):
    (gap,) = [d for d in row_differences(Measured.of(model).section(), better, "A-DDPM") if d.where.endswith("K = 10")]
    assert gap.error is not None
    assert gap.mean < -5 * gap.error


@pytest.mark.parametrize("model", models())
def test_ddim_draws_better_images_with_more_steps(model):
    limits = {K: cell["limit"] for K, cell in Measured.of(model).images["DDIM"].items()}
    assert {10, 25, 50} <= set(limits)
    assert limits[50] < limits[25] < limits[10]


@pytest.mark.parametrize("model", models())
def test_images_of_the_nine_rows_of_the_paper_and_of_three_solvers_are_measured(model):
    drawn = Measured.of(model).images
    for name in (*PAPER, "UniPC", "DPM-Solver++", "SDE-DPM-Solver++"):
        assert {10, 25, 50} <= set(drawn[name]), name


def test_images_of_the_new_covariances_are_measured_on_cifar10():
    drawn = Measured.of("cifar10").images
    for name in ("CNPR-DDPM", "CNPR-DDIM", "CSN-DDPM", "Spectral-DDPM", "OCM-DDPM", "Bridge 2M"):
        assert {10, 25, 50} <= set(drawn[name]), name


@pytest.mark.parametrize("model", models())
def test_the_bounds_have_the_order_of_the_paper(model):
    """NPR < A < beta, by more than three standard errors at every number of steps."""
    found = Measured.of(model)
    for better, worse in (("NPR-DDPM", "A-DDPM"), ("A-DDPM", "DDPM, beta")):
        gaps = bit_differences(found, better, worse)
        assert len(gaps) >= 5
        for gap in gaps:
            assert gap.error is not None
            assert gap.mean < -3 * gap.error, (better, gap.where)


def test_a_changed_number_is_noticed():
    page, made = PAGE.read_text(encoding="utf-8"), parts(models())
    changed = {name: text.replace("NPR-DDPM | ", "NPR-DDPM | 9", 1) for name, text in made.items()}
    assert inserted(page, changed) != page


def test_the_plot_is_there_and_small():
    assert 5_000 < PLOT.stat().st_size < 200_000  # two models, two panels each
