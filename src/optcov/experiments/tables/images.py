"""The images of a table: where trajectories are chosen, what is scored, what samples are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from optcov import data
from optcov.bundle import test_set
from optcov.data import ImageSet


@final
@dataclass(frozen=True)
class TableImages:
    """Three sets; train and test have no image in common."""

    train: ImageSet  # chooses optimal trajectories
    test: ImageSet  # is scored
    reference: ImageSet  # what samples are compared with
    name: str
    embedded: bool = False  # then the reference is of test images too, unlike the paper's, which is the training set

    @staticmethod
    def blank(shape: tuple[int, ...]) -> TableImages:
        """For the table of costs, which looks at no image: a black one stands for each set."""
        black = ImageSet(torch.zeros(1, *shape, dtype=torch.uint8), None, "no images")
        return TableImages(black, black, black, black.name)

    @staticmethod
    def load(source: str | None, bundle_name: str, channels: int | None = None) -> TableImages:
        """From a source of images as optcov.data reads it, or None for those that come with an embedded model.

        channels: those that the bundle's network takes; None leaves them as they are.
        """
        if source is not None:
            train, test = (data.load_mixed(source, split) for split in ("train", "test"))
            if channels is not None:
                train, test = data.with_channels(train, channels), data.with_channels(test, channels)
            return TableImages(train, test, train, source)
        known = test_set(bundle_name)
        embedded = ImageSet(known.images, known.labels, f"{bundle_name}'s embedded test images")
        half = len(embedded) // 2
        return TableImages(
            embedded.select(slice(0, half)), embedded.select(slice(half, None)), embedded, embedded.name, embedded=True
        )
