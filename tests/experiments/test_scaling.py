"""What the page on costs at scale says is what its script counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from optcov.fitting.settings import FitSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_smallest_network_is_counted_as_known(scaling):
    weights, flops = scaling.MODELS[0].count()
    assert weights == 35_746_307
    assert flops == pytest.approx(12.4e9, rel=0.01)  # 12.1 and the products of attention


def test_evaluations_of_a_fit_are_those_of_the_defaults(scaling):
    own = FitSettings()
    assert own.images + own.times * own.measure_images + own.calibration_samples == scaling.FIT


@pytest.mark.parametrize(("seconds", "shown"), [(2.44, "2.4 s"), (100, "1.7 min"), (7200, "2 h"), (1e6, "12 days")])
def test_durations_have_two_digits(scaling, seconds, shown):
    assert scaling.duration(seconds) == shown


@pytest.mark.long
def test_the_page_has_the_table_that_the_script_makes(scaling):
    assert scaling.table() in scaling.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_slopes_of_the_lines(scaling):
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.inserted(page, {"slopes": scaling.slopes(scaling.read())}) == page


def test_costs_are_proportional_to_evaluations(scaling):
    found = {line["name"]: scaling.slope(line) for line in scaling.read()}
    assert list(found) == list(scaling.AXES)
    for name in ("fit", "samples", "table"):
        assert 0.85 <= found[name] <= 1.15
    assert found["network"] < 1


def test_a_slope_is_that_of_a_power(scaling):
    assert scaling.slope({"sizes": [1, 2, 8], "seconds": [3, 12, 192]}) == pytest.approx(2)
