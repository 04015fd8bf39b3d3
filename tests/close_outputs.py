"""How near two outputs of the same network must be when more than rounding must not differ.

A network rounds otherwise wherever its weights lie elsewhere in memory, want gradients, are laid out by channels, or
meet another batch size, number of threads or CPU: the kernels sum in another order. Measured on small U-Nets, that is
2e-7 to 2e-6 of the largest output. Weights rounded to half precision differ by 1e-4 or more, a lost weight by far more.
"""

from __future__ import annotations

from torch import Tensor

ROUNDING = 1e-5  # of the largest output


def assert_close_outputs(found: Tensor, expected: Tensor, tolerance: float = ROUNDING) -> None:
    """Fail if two outputs differ by more than rounding, relative to the largest of the expected one."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    largest = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    assert difference <= tolerance * largest, f"outputs up to {largest:.3g} differ by {difference:.3g}"
