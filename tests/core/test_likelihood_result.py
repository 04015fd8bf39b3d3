"""A table of bounds finds its rows by every name that a reader may know."""

from __future__ import annotations

import pytest

from optcov.likelihood import Estimate
from optcov.likelihood.result import LikelihoodRow, Likelihoods

SCORE = Likelihoods(
    (
        LikelihoodRow("npr_isotropic", "ET", 10, (), Estimate(4.0, 0.1, 8), None, ()),
        LikelihoodRow("npr", "ET", 10, (), Estimate(3.0, 0.1, 8), None, ()),
    )
)


@pytest.mark.parametrize(
    ("name", "bound"), [("npr", 3.0), ("NPR-DDPM", 3.0), ("npr_isotropic", 4.0), ("isotropic NPR-DDPM", 4.0)]
)
def test_a_row_is_found_by_its_covariance_its_method_and_the_name_that_is_printed(name, bound):
    assert SCORE.of(name, 10).mean == bound


def test_every_row_is_found_by_the_names_in_the_error():
    with pytest.raises(ValueError, match="there is no bound of 'SN-DDPM' in 10 steps") as raised:
        SCORE.of("SN-DDPM", 10)
    for name in str(raised.value).rpartition("there are ")[2].split(", "):
        SCORE.of(name, 10)


def test_a_bound_in_other_steps_is_refused():
    with pytest.raises(ValueError, match="'npr' in 25 steps"):
        SCORE.of("npr", 25)
