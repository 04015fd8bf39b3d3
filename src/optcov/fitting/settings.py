"""The settings of a fit, and their allowed values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

from optcov.fitting.config import MOST, TrainingError
from optcov.schedule import is_whole


@final
@dataclass(frozen=True)
class FitSettings:
    """How a fit is done. The defaults fit heads in closed form, in minutes.

    kind: "auto" | "timed" | "deep" | "conv" | "residual". Deep heads are timed heads with hidden layers; these train on
    the features that the fit keeps. Residual heads train by AdamW; only they use steps, learning_rate, checkpoint_every
    and the score_ settings.
    paper_exact: squared errors and linear outputs, as in the paper.
    times: the numbers per time and the spectra are measured at about this many times; 0 means all times of a discrete
    schedule.
    measure_images: how many images are measured at each time. With 0, the numbers come from the samples of the fit, and
    no spectra are measured.
    calibration_samples: how many held-out samples test the heads; 0 skips the calibration.
    evaluations: the number of network evaluations in all. It scales images, measure_images and calibration_samples. 0
    leaves them as they are, which makes 15,745 evaluations by default.
    half: round a copy of the network to float16.
    empty_class: the class of a foreign network that stands for no class. Networks trained here store it themselves.
    empty_share: share of images that are fitted without their condition, if the network knows an empty condition.
    """

    images: int = 4096  # of a closed-form fit
    kind: str = "auto"
    paper_exact: bool = False
    time_weighted: bool = False  # with paper_exact: divide squared errors by the mean target's square
    steps: int = 20_000
    learning_rate: float = 1e-4
    checkpoint_every: int = 1000
    score_samples: int = 0
    score_steps: int = 50
    score_features: str = "fashion"
    times: int = 100
    measure_images: int = 96
    calibration_samples: int = 2048
    evaluations: int = 0
    batch_size: int = 64
    half: bool = False
    flip: bool = False  # mirrored images are others than the network knows, unless it was trained on such
    seed: int = 0
    empty_class: int | None = None
    empty_share: float = 0.1

    @staticmethod
    def of(options: Mapping[str, Any]) -> FitSettings:
        """Make settings from options by name; an unknown name is a ValueError."""
        known = [field.name for field in fields(FitSettings)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TrainingError(f"a fit has no setting {unknown[0]!r}; it has {', '.join(known)}")
        return FitSettings(**options)

    def __post_init__(self) -> None:
        once = ("images", "steps", "batch_size", "checkpoint_every", "score_steps")  # of which there must be one
        work = (
            "images",
            "steps",
            "measure_images",
            "calibration_samples",
            "score_samples",
            "score_steps",
            "evaluations",
        )
        for name in dict.fromkeys((*once, "times", *work)):
            value, positive = getattr(self, name), name in once
            if not isinstance(value, int) or value < positive:
                raise TrainingError(
                    f"{name} = {value!r} must be a whole number{' of at least 1' if positive else ', 0 or more'}"
                )
            if name in work and value > MOST:
                raise TrainingError(f"{name} = {value} would never end; use {MOST} or fewer")
        if not is_whole(self.seed) or abs(self.seed) >= 2**63:
            raise TrainingError(f"seed = {self.seed!r} is not a whole number of 64 bits; pass one such as 0")
        for name in ("paper_exact", "time_weighted", "half", "flip"):
            if not isinstance(getattr(self, name), bool):
                raise TrainingError(f"{name} = {getattr(self, name)!r} is not a switch; pass True or False")
        if self.empty_class is not None and (not is_whole(self.empty_class) or self.empty_class < 0):
            raise TrainingError(
                f"empty_class = {self.empty_class!r} is no class; pass a whole number, or None for none"
            )
        if not isinstance(self.empty_share, float | int) or not 0 <= self.empty_share <= 1:
            raise TrainingError(f"empty_share = {self.empty_share!r} is no share; pass a number from 0 to 1")
        if not isinstance(self.learning_rate, float | int) or not 0 < self.learning_rate < math.inf:
            raise TrainingError(f"learning_rate = {self.learning_rate!r} is not a positive number")
        if self.score_samples and self.kind != "residual":
            raise TrainingError("only residual heads have checkpoints to choose among by a score; use kind residual")
