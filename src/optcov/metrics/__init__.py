"""Distances between sets of images: Frechet and kernel distances of features."""

from optcov.metrics.classifier import fashion_classifier
from optcov.metrics.extractors import Extractor, find_extractor
from optcov.metrics.frechet import Distance, frechet_distance, jackknife_error, measure_frechet
from optcov.metrics.gathering import gather_statistics
from optcov.metrics.kernel import KernelDistance, kernel_distance, measure_kernel
from optcov.metrics.sources import features_of
from optcov.metrics.statistics import FeatureStatistics, MetricError, merge_all

__all__ = [
    "Distance",
    "Extractor",
    "FeatureStatistics",
    "KernelDistance",
    "MetricError",
    "fashion_classifier",
    "features_of",
    "find_extractor",
    "frechet_distance",
    "gather_statistics",
    "jackknife_error",
    "kernel_distance",
    "measure_frechet",
    "measure_kernel",
    "merge_all",
]
