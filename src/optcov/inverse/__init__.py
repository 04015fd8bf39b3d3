"""Inverse problems: images from linear measurements, with honest uncertainty, by the posterior covariance."""

from optcov.inverse.blur import Blur
from optcov.inverse.operators import Average, Composition, Identity, Linear, Mask, Operator
from optcov.inverse.restoration import Restoration
from optcov.inverse.restoring import BASELINES, DEFAULT_METHOD, restore

__all__ = [
    "BASELINES",
    "DEFAULT_METHOD",
    "Average",
    "Blur",
    "Composition",
    "Identity",
    "Linear",
    "Mask",
    "Operator",
    "Restoration",
    "restore",
]
