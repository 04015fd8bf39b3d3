"""optcov: the optimal reverse covariance of a diffusion model you already have.

Names are imported when first used, so that the command line starts without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from optcov import integrations, inverse, oracle
    from optcov.bundle import Bundle, load
    from optcov.fitting.fit import fit
    from optcov.forward import Bridge, ForwardProcess
    from optcov.gaussian import Gaussian, kl_divergence
    from optcov.integrations.diffusers import attach
    from optcov.likelihood import CostTable, ElboTerms, cost_table, elbo
    from optcov.methods import METHODS
    from optcov.prediction import NoisePrediction, Prediction
    from optcov.reverse import ReverseProcess
    from optcov.sampling import generate, sample
    from optcov.schedule import Schedule
    from optcov.trajectory import Trajectory

_HOMES = {
    "Bridge": "forward",
    "Bundle": "bundle",
    "CostTable": "likelihood",
    "ElboTerms": "likelihood",
    "ForwardProcess": "forward",
    "Gaussian": "gaussian",
    "METHODS": "methods",
    "NoisePrediction": "prediction",
    "Prediction": "prediction",
    "ReverseProcess": "reverse",
    "Schedule": "schedule",
    "Trajectory": "trajectory",
    "attach": "integrations.diffusers",
    "cost_table": "likelihood",
    "elbo": "likelihood",
    "fit": "fitting.fit",
    "generate": "sampling",
    "kl_divergence": "gaussian",
    "load": "bundle",
    "sample": "sampling",
}
_MODULES = ("integrations", "inverse", "oracle")

__all__ = [
    "METHODS",
    "Bridge",
    "Bundle",
    "CostTable",
    "ElboTerms",
    "ForwardProcess",
    "Gaussian",
    "NoisePrediction",
    "Prediction",
    "ReverseProcess",
    "Schedule",
    "Trajectory",
    "attach",
    "cost_table",
    "elbo",
    "fit",
    "generate",
    "integrations",
    "inverse",
    "kl_divergence",
    "load",
    "oracle",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"optcov.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"optcov.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'optcov' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
