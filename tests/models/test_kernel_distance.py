"""The kernel distance over all pairs: by hand, without bias, and with an error that is neither too small nor wild."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from optcov.metrics import MetricError, measure_kernel
from optcov.metrics.kernel import KernelSide


def draws(n: int, d: int, seed: int, shift: float = 0.0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def by_hand(first: Tensor, second: Tensor, keep_own: bool = False) -> float:
    """keep_own: with the pairs of a row and itself, which makes it biased."""

    def within(rows: Tensor) -> float:
        kernel = (rows @ rows.T / rows.shape[1] + 1) ** 3
        n = len(rows)
        return float(kernel.sum() / n**2 if keep_own else (kernel.sum() - kernel.trace()) / (n * (n - 1)))

    return within(first) + within(second) - 2 * float(((first @ second.T / first.shape[1] + 1) ** 3).mean())


def test_it_is_the_mean_over_all_pairs_and_its_replicates_leave_groups_out() -> None:
    first, second = draws(31, 5, 0), draws(47, 5, 1, 0.3)
    found = measure_kernel(first, second, mix=False)
    assert found.value == found.limit == pytest.approx(by_hand(first, second), abs=1e-12)
    assert found.counts == (31, 47)
    assert [len(part) for part in found.replicates] == [15, 20]
    for group, value in enumerate(found.replicates[0]):
        rest = torch.arange(31) % 15 != group
        assert value == pytest.approx(by_hand(first[rest], second), abs=1e-12)
    for group, value in enumerate(found.replicates[1]):
        rest = torch.arange(47) % 20 != group
        assert value == pytest.approx(by_hand(first, second[rest]), abs=1e-12)
    assert measure_kernel(first, second).value == pytest.approx(found.value, abs=1e-12)


def test_it_is_unbiased_for_equal_distributions() -> None:
    """The mean of 200 lies within 3 of its standard errors of 0; with the pairs of a row and itself it does not."""
    pairs = [(draws(40, 6, 2 * k), draws(60, 6, 2 * k + 1)) for k in range(200)]
    for biased, holds in ((False, True), (True, False)):
        values = torch.tensor(
            [by_hand(*pair, keep_own=True) if biased else measure_kernel(*pair).value for pair in pairs]
        )
        error = float(values.std()) / math.sqrt(len(values))
        assert (abs(float(values.mean())) < 3 * error) == holds


@pytest.mark.parametrize(("shift", "most"), [(0.4, 1.3), (0.0, 2.0)])
def test_its_standard_error_is_the_spread_of_the_distance(shift: float, most: float) -> None:
    """Right where the distributions differ; where they are equal, it is up to twice as large, not too small."""
    found = [measure_kernel(draws(80, 6, 2 * k, shift), draws(120, 6, 2 * k + 1)) for k in range(100)]
    spread = float(torch.tensor([result.value for result in found]).std())
    error = math.sqrt(sum((result.standard_error or 0) ** 2 for result in found) / len(found))
    assert 0.75 < error / spread < most


def test_a_side_is_prepared_once_for_many_others() -> None:
    reference = KernelSide.of(draws(50, 4, 0))
    kept = reference.inner
    first = measure_kernel(draws(20, 4, 1), reference)
    assert reference.inner is kept
    assert first == measure_kernel(draws(20, 4, 1), draws(50, 4, 0))


def test_what_has_no_kernel_distance_is_refused() -> None:
    with pytest.raises(MetricError, match="at least 4 images"):
        measure_kernel(draws(3, 4, 0), draws(9, 4, 0))
    with pytest.raises(MetricError, match=r"got \(9, 4\) and \(9, 5\)"):
        measure_kernel(draws(9, 4, 0), draws(9, 5, 0))
    with pytest.raises(MetricError, match="NaN"):
        measure_kernel(draws(9, 4, 0) / 0, draws(9, 4, 0))
