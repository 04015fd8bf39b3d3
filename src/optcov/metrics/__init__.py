"""Distances between sets of images: Frechet and kernel distances of features."""

from optcov.metrics.classifier import FashionClassifier, fashion_classifier
from optcov.metrics.extractors import Extractor, find_extractor
from optcov.metrics.frechet import Distance, frechet_distance, jackknife_error, measure_frechet
from optcov.metrics.kernel import KernelDistance, kernel_distance
from optcov.metrics.sources import features_of
from optcov.metrics.statistics import FeatureStatistics, MetricError, merge_all

__all__ = [
    "Distance",
    "Extractor",
    "FashionClassifier",
    "FeatureStatistics",
    "KernelDistance",
    "MetricError",
    "fashion_classifier",
    "features_of",
    "find_extractor",
    "frechet_distance",
    "jackknife_error",
    "kernel_distance",
    "measure_frechet",
    "merge_all",
]
