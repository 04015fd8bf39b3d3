"""How near two outputs of the same network must be when more than rounding must not differ.

A network rounds otherwise wherever its weights lie elsewhere in memory, want gradients, are laid out by channels, or
meet another batch size, number of threads or CPU: the kernels sum in another order. Measured on small U-Nets, that is
2e-7 to 2e-6 of the largest output. Weights rounded to half precision differ by 1e-4 or more, a lost weight by far more.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

ROUNDING = 1e-5  # of the largest output


def assert_close_outputs(found: Tensor, expected: Tensor, tolerance: float = ROUNDING) -> None:
    """Fail if two outputs differ by more than rounding, relative to the largest of the expected one."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    largest = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    assert difference <= tolerance * largest, f"outputs up to {largest:.3g} differ by {difference:.3g}"


def assert_close_results(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Fail if two results that are read from JSON differ by more than rounding: in a number, or at all elsewhere.

    Results add to the rounding of one output that of the steps after it, and differences of nearly equal numbers.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close_results(found[name], value, tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close_results(one, other, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance)
    else:
        assert found == expected
