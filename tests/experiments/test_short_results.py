"""The short page of results says what the appendix says."""

from __future__ import annotations

import pytest
from short_results import APPENDIX, PAGE, PLOT, claims, inserted, made, numbers

TEXT = APPENDIX.read_text(encoding="utf-8")


def test_the_short_page_has_the_numbers_and_claims_of_the_appendix():
    page = PAGE.read_text(encoding="utf-8")
    assert inserted(page, made(TEXT)) == page, "run python scripts/short_results.py"


def test_a_changed_number_of_the_appendix_is_noticed():
    number = numbers(TEXT, "## Samples")["NPR-DDPM"]["K = 10"]
    page = PAGE.read_text(encoding="utf-8")
    assert inserted(page, made(TEXT.replace(number, "9.99 ± 0.01"))) != page


@pytest.mark.parametrize("heading", ["## Samples", "## Likelihoods"])
def test_claims_come_with_a_verdict(heading):
    found = claims(TEXT, heading)
    assert len(found) >= 5
    assert all(claim and verdict for claim, verdict in found)


def test_the_plot_is_there_and_small():
    assert 5_000 < PLOT.stat().st_size < 100_000
