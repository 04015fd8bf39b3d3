"""optcov: the optimal reverse covariance of a diffusion model you already have."""

from optcov import oracle
from optcov.forward import Bridge, ForwardProcess
from optcov.gaussian import Gaussian, kl_divergence
from optcov.prediction import NoisePrediction
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule
from optcov.trajectory import Trajectory

__version__ = "0.1.0.dev0"

__all__ = [
    "Bridge",
    "ForwardProcess",
    "Gaussian",
    "NoisePrediction",
    "ReverseProcess",
    "Schedule",
    "Trajectory",
    "kl_divergence",
    "oracle",
]
