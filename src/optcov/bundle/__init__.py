"""What is saved and loaded: a network with its heads, numbers per time, trajectories and history."""

from optcov.bundle.bundle import Bundle
from optcov.bundle.errors import BundleError
from optcov.bundle.loading import embedded_models, find_bundle, load, test_images, test_set
from optcov.bundle.numbers import NumbersPerTime
from optcov.bundle.sampler import Sampler
from optcov.bundle.schedules import StoredTrajectory, build_schedule, schedule_spec
from optcov.bundle.spectra import Spectra

__all__ = [
    "Bundle",
    "BundleError",
    "NumbersPerTime",
    "Sampler",
    "Spectra",
    "StoredTrajectory",
    "build_schedule",
    "embedded_models",
    "find_bundle",
    "load",
    "schedule_spec",
    "test_images",
    "test_set",
]
