"""The score that chooses the best checkpoint: the Frechet distance of some samples to the training images.

The paper takes FID on 1,000 samples. Every checkpoint draws from the same noise, so that differences are not luck.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from optcov.bundle import Bundle
from optcov.data import ImageSet
from optcov.fitting.batches import step_generator
from optcov.fitting.config import TrainingError
from optcov.metrics import FeatureStatistics, find_extractor, frechet_distance
from optcov.metrics.sources import Drawing, draw_images
from optcov.networks import HeadedNetwork
from optcov.prediction import Source, condition_of


@final
@dataclass(frozen=True)
class ScoreSettings:
    """How samples are drawn and compared; features as in `optcov.metrics.find_extractor`."""

    samples: int = 1000
    steps: int = 50
    method: str = "DDIM"
    features: str = "fashion"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise TrainingError(
                f"a score by {self.samples} samples has no covariance; use 2 or more, or 0 for no score"
            )
        if self.steps < 2:
            raise TrainingError(f"samples of a score need 2 steps or more, got {self.steps}")


@final
class SampleScore:
    """Call it for the score of the weights that are in the network now; lower is better.

    told: the images with what the network is told about them; samples are told the same, in the same proportions.
    """

    def __init__(self, network: HeadedNetwork, images: ImageSet, settings: ScoreSettings, told: Source | None = None):
        self.network, self.image_shape, self.settings = network, images.shape, settings
        self._extractor = find_extractor(settings.features)
        order = torch.randperm(len(images), generator=step_generator(settings.seed, "score", 0))
        self._condition = condition_of(told, order[torch.arange(settings.samples) % len(images)])
        # at once: images that the features are not made for should not cost the steps to the first checkpoint
        self._wanted = FeatureStatistics.of(self._extractor.features(images))

    def __call__(self) -> float:
        """Frechet distance of fresh samples to the training images."""
        bundle = Bundle(self.network, self.image_shape)
        drawing = Drawing(self.settings.samples, self.settings.steps, self.settings.seed)
        drawn = draw_images(bundle, self.settings.method, drawing, self._condition)
        return frechet_distance(FeatureStatistics.of(self._extractor.features(drawn)), self._wanted)
