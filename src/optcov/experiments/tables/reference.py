"""What samples are compared with: images of the table, or a source that was named."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from torch import Tensor

from optcov.bundle import load
from optcov.data import ImageSet
from optcov.experiments.tables.images import TableImages
from optcov.experiments.tables.sizes import MOST_SAMPLES
from optcov.metrics import Extractor, FeatureStatistics, features_of, measure_frechet
from optcov.metrics.frechet import Features, mixed
from optcov.metrics.sources import Drawing, split_method

EXACT = 5000  # images from which on a reference counts as exact rather than being resampled
APART = MOST_SAMPLES  # number of the first image that a reference draws: its noise is independent of every row's


@final
@dataclass(frozen=True)
class Reference:
    """The first images of a table's reference set, or another source in their place."""

    images: TableImages
    count: int  # of the images; 0: all
    source: str | None = None  # images, statistics or BUNDLE:METHOD, as optcov frechet reads them

    def features(self, extractor: Extractor) -> Features:
        """Features, or statistics where images are many or statistics all there is; refuses what cannot be compared."""
        found: Features
        if self.source is None:
            found = extractor.features(self._chosen)
        else:
            found = features_of(self.source, extractor, Drawing(first=APART))
            found = mixed(found) if isinstance(found, Tensor) else found
        if isinstance(found, Tensor) and len(found) >= EXACT:
            found = FeatureStatistics.of(found)
        one = extractor.features(self.images.test.select(slice(0, 1)))
        measure_frechet(one.expand(4, -1), found, groups=2)  # so that it is refused before images are drawn
        return found

    @cached_property
    def identity(self) -> str:
        """Changes with the content: of a bundle that draws with all of its numbers, of files with their bytes."""
        if self.source is None:
            return self._chosen.checksum
        name, method = split_method(self.source)
        if method is not None:
            return f"{self.source} {load(name).digest()} from image {APART}"
        return " ".join(part for part in (self.source, _content(Path(name.partition("#")[0]))) if part)

    @property
    def name(self) -> str:
        """In words."""
        if self.source is not None:
            return self.source
        count = f"{len(self._chosen):,}"
        if self.images.embedded:
            return f"{count} of {self.images.name}, not the training set as in the paper (give it by --data)"
        return f"{count} training images of {self.images.name}"

    @property
    def _chosen(self) -> ImageSet:
        return self.images.reference.select(slice(0, self.count)) if self.count else self.images.reference


def _content(path: Path) -> str:
    """SHA-256 of a file, or of all files below a directory with their names; empty if there is neither."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(part for part in path.rglob("*") if part.is_file()):
        digest.update(f"{file.relative_to(path)}\n{_content(file)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
