"""Mean and covariance of features, gathered in float64 and merged exactly over batches, shards and processes.

Two sets with counts n, m, means a, b and scatters A, B (sums of squares about the mean) merge to

    count n + m,    mean a + (b - a) m / (n + m),    scatter A + B + (b - a)(b - a)^T n m / (n + m)

which subtracts no large numbers, unlike sums of squares about 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from optcov import storage
from optcov.data.arrays import read_npz

LARGEST = 1e100  # of a mean or covariance, so that no square overflows
MOST_LETTERS = 1000  # of what names the features
INDEFINITE = 1e-4  # share of the largest eigenvalue that a negative one may have: float32 statistics are that inexact


class MetricError(ValueError):
    """A distance cannot be measured; the message says why."""


@final
@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and covariance of a set of features.

    >>> whole = FeatureStatistics.of(torch.randn(100, 3))
    >>> whole.mean.shape, whole.covariance.dtype
    (torch.Size([3]), torch.float64)
    """

    mean: Tensor  # float64, (d,)
    covariance: Tensor  # unbiased, float64, (d, d)
    count: int | None  # None if the statistics came from a file that does not tell
    features: str | None = None  # the identity of the extractor; None if nobody told
    images: str | None = None  # the checksum of the images; None if nobody told
    rows: Tensor | None = None  # (k, d), features of some of the images, drawn at random: for the kernel distance

    def __post_init__(self) -> None:
        d = self.mean.shape[0] if self.mean.ndim == 1 else -1
        if self.covariance.shape != (d, d) or d == 0:
            raise MetricError(
                f"statistics need a mean (d,) and a covariance (d, d), got {tuple(self.mean.shape)} and "
                f"{tuple(self.covariance.shape)}"
            )
        if self.mean.dtype != torch.float64 or self.covariance.dtype != torch.float64:
            raise MetricError(f"statistics are float64, got {self.mean.dtype} and {self.covariance.dtype}")
        if not bool((self.mean.abs() < LARGEST).all() and (self.covariance.abs() < LARGEST).all()):
            raise MetricError(f"statistics hold NaN, infinity or a number beyond {LARGEST:g}; check the images")
        if self.rows is not None and not (
            self.rows.ndim == 2
            and self.rows.shape[1] == d
            and self.rows.is_floating_point()
            and bool(self.rows.isfinite().all())
        ):
            raise MetricError(f"rows of features must be finite numbers (k, {d}), got shape {tuple(self.rows.shape)}")

    @property
    def dimension(self) -> int:
        """Number of features."""
        return len(self.mean)

    @staticmethod
    def of(features: Tensor) -> FeatureStatistics:
        """Statistics of features (n, d); one row is good for merging alone, its covariance is 0."""
        if features.ndim != 2 or len(features) < 1:
            raise MetricError(f"statistics need rows of features (n, d), got shape {tuple(features.shape)}")
        values = features.detach().to("cpu", torch.float64)
        mean = values.mean(0)
        centred = values - mean
        return FeatureStatistics(mean, centred.T @ centred / max(len(values) - 1, 1), len(values))

    def merge(self, other: FeatureStatistics) -> FeatureStatistics:
        """Statistics of both sets together."""
        if self.count is None or other.count is None:
            raise MetricError("statistics without a count cannot be merged; gather them from images")
        check_same_dimension(self.dimension, other.dimension)
        n, m = self.count, other.count
        difference = other.mean - self.mean
        between = torch.outer(difference, difference) * (n * m / (n + m))
        scatter = self.covariance * (n - 1) + other.covariance * (m - 1) + between
        features = self.features if self.features == other.features else None
        return FeatureStatistics(self.mean + difference * (m / (n + m)), scatter / (n + m - 1), n + m, features)

    def save(self, path: Path, packed: bool = False) -> None:
        """Write as npz: mu and sigma, the usual names, and what else is known; texts as bytes of UTF-8.

        packed: sigma is its lower triangle in one row, which takes half the space, and which only optcov reads.
        """
        arrays = {"mu": self.mean.numpy(), "sigma": self.covariance.numpy()}
        if self.count is not None:
            arrays["count"] = np.array(self.count)
        for name, text in (("features", self.features), ("images", self.images)):
            if text is not None:
                arrays[name] = np.frombuffer(text.encode(), np.uint8)
        if self.rows is not None:
            # compact, as there are many numbers: float16 rows, and then float32 will do for the covariance too
            arrays |= {"sigma": self.covariance.float().numpy(), "rows": self.rows.half().numpy()}
        if packed:
            arrays["sigma"] = arrays["sigma"][np.tril_indices(self.dimension)]
        with storage.atomic_writer(path) as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path) -> FeatureStatistics:
        """Read mu and sigma, and of the others what the file has."""
        return statistics_from(read_npz(path), path)


def statistics_from(arrays: dict[str, np.ndarray[Any, Any]], path: Path) -> FeatureStatistics:
    """Build statistics from the arrays of a npz file."""
    if not {"mu", "sigma"} <= set(arrays):
        raise MetricError(f"{path} holds {', '.join(arrays)}; statistics need mu and sigma")
    mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)) for name in ("mu", "sigma"))
    if mean.ndim == 1 and covariance.shape == (len(mean) * (len(mean) + 1) // 2,):
        covariance = _unpacked(covariance, len(mean))
    count = arrays.get("count")
    if count is not None and (count.shape != () or count.dtype.kind not in "iu" or int(count) < 1):
        raise MetricError(f"{path}: the count must be an integer of at least 1")
    features, images = (_text(arrays, name, path) for name in ("features", "images"))
    rows = arrays.get("rows")
    if rows is not None and rows.dtype not in (np.float16, np.float32, np.float64):
        raise MetricError(f"{path}: rows of features must be floating-point numbers, got {rows.dtype}")
    kept = None if rows is None else torch.from_numpy(rows)
    try:
        statistics = FeatureStatistics(mean, covariance, None if count is None else int(count), features, images, kept)
        check_covariance(covariance)
    except MetricError as error:
        raise MetricError(f"{path}: {error}") from error
    return statistics


def _unpacked(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrix (size, size) of which these are the rows up to the diagonal."""
    matrix = triangle.new_zeros(size, size)
    rows, columns = torch.tril_indices(size, size)
    matrix[rows, columns] = matrix[columns, rows] = triangle
    return matrix


def _text(arrays: dict[str, np.ndarray[Any, Any]], name: str, path: Path) -> str | None:
    found = arrays.get(name)
    if found is None:
        return None
    try:
        if found.dtype != np.uint8 or found.ndim != 1 or len(found) > MOST_LETTERS:
            raise ValueError
        return found.tobytes().decode()
    except ValueError as error:
        raise MetricError(f"{path}: what names the {name} is no text; write the file again by --save-first") from error


def check_same_features(statistics: FeatureStatistics, wanted: str, source: object) -> None:
    """Refuse statistics that are known to be of other features, though these may have as many dimensions."""
    if statistics.features not in (None, wanted):
        names = [identity.partition(" ")[0] for identity in (str(statistics.features), wanted)]
        known = names if names[0] != names[1] else [f"another {names[0]}", f"this {names[0]}"]
        raise MetricError(
            f"{source} holds statistics of {known[0]!r}, which cannot be compared with {known[1]!r}; use one feature "
            f"extractor for both"
        )


def merge_all(parts: Iterable[FeatureStatistics]) -> FeatureStatistics:
    """Statistics of several sets together."""
    return reduce(FeatureStatistics.merge, parts)


def check_covariance(covariance: Tensor) -> None:
    """Refuse a matrix that is not symmetric, or has a negative eigenvalue that rounding does not explain."""
    asymmetry = float((covariance - covariance.T).abs().max())
    if asymmetry > 1e-6 * max(float(covariance.abs().max()), 1e-300):
        raise MetricError(f"sigma is not symmetric (it differs from its transpose by {asymmetry:.3g})")
    check_definite(torch.linalg.eigvalsh((covariance + covariance.T) / 2))


def check_definite(eigenvalues: Tensor) -> None:
    """Refuse a covariance by its eigenvalues, the least first, if rounding does not explain a negative one."""
    least, largest = float(eigenvalues[0]), float(eigenvalues.abs().max())
    if least < -INDEFINITE * largest:
        raise MetricError(f"this is no covariance: it has the eigenvalue {least:.3g} beside {largest:.3g}")


def check_same_dimension(first: int, second: int) -> None:
    """Refuse to compare features of different extractors."""
    if first != second:
        raise MetricError(
            f"features of {first} and of {second} dimensions cannot be compared; use one extractor for both"
        )
