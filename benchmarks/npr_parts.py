"""What NPR's variance does to samples, in two parts: its pattern over pixels, and its level.

    python benchmarks/npr_parts.py --data data/fashion-mnist [--bundle fashion] [--samples 512] [--steps 10]

Against the analytic variance, which has one level per time and no pattern, stand NPR's own; its pattern at the analytic
level; and its level, image by image, without the pattern. On images of the data set both levels agree; on images that
are being drawn NPR's may be another. All start from the same noise, so that differences of distances have errors below
those of the distances. The level shown is that of the last step that is not capped, relative to the analytic one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from optcov import bundle
from optcov.bundle import Bundle
from optcov.covariances import Analytic, Covariance, Residual
from optcov.data import ImageSet, load, to_8bit
from optcov.gaussian import Diagonal
from optcov.metrics import Distance, FeatureStatistics, find_extractor, jackknife_error, measure_frechet
from optcov.prediction import Prediction
from optcov.reverse import Step
from optcov.sampling import generate

METHOD = "NPR-DDPM"


@final
class Parts(Covariance):
    """NPR's variance with its level or its pattern taken from the analytic one."""

    def __init__(self, model: Bundle, *, own_level: bool, own_pattern: bool):
        self._mean_square_noise = model.per_time("mean_square_noise")
        self._own_level, self._own_pattern = own_level, own_pattern

    def second_moment(self, prediction: Prediction) -> Diagonal:
        v = prediction.head_in_clean_units("npr")
        own = v.mean(dim=(1, 2, 3), keepdim=True)
        analytic = prediction.factor("noise") * (1 - self._mean_square_noise(prediction.t))
        level = own if self._own_level else analytic.to(v)
        return Diagonal(v / own * level if self._own_pattern else level.expand_as(v))


COVARIANCES: dict[str, Callable[[Bundle], Covariance]] = {
    "analytic": lambda model: Analytic(model.per_time("mean_square_noise")),
    "NPR": lambda model: Residual(),
    "NPR's pattern": lambda model: Parts(model, own_level=False, own_pattern=True),
    "NPR's level": lambda model: Parts(model, own_level=True, own_pattern=False),
}


def draw(model: Bundle, covariance: Covariance, options: argparse.Namespace) -> tuple[Tensor, float]:
    """Images (B, *D), and the mean variance of the last step that is not capped."""
    process = model.reverse_process(METHOD, covariance=covariance)
    trajectory = model.trajectory(options.steps)
    found: list[float] = []

    def watch(step: Step) -> None:
        if step.s == trajectory.times[1]:
            found.append(float(step.gaussian.variance.mean()))

    cap = model.noise_cap(METHOD)
    drawn = generate(process, trajectory, model.image_shape, options.samples, noise_cap=cap, callback=watch)
    return torch.cat([batch.images for batch in drawn]), sum(found) / len(found)


def paired_error(first: Distance, second: Distance) -> float:
    """Standard error of the difference of two distances of images of the same noise."""
    groups = zip(first.replicates, second.replicates, strict=True)
    return jackknife_error([[a - b for a, b in zip(*parts, strict=True)] for parts in groups])


def main() -> None:
    """Print a line per schedule and covariance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="the data set, e.g. by optcov data fashion-mnist")
    parser.add_argument("--bundle", default="fashion", help="a bundle with the head npr and numbers per time")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*outside those the network was trained on")  # cosine, first step
    extractor = find_extractor("fashion")
    reference = FeatureStatistics.of(extractor.features(load(options.data)))
    print("schedule  covariance       distance - analytic    level")
    for schedule in ("linear", "cosine"):
        model = bundle.load(options.bundle).with_schedule(schedule)
        plain: tuple[Distance, float] | None = None
        for name, covariance in COVARIANCES.items():
            images, level = draw(model, covariance(model), options)
            features = extractor.features(ImageSet(to_8bit(images), None, name))
            distance = measure_frechet(features, reference, mix=False)
            plain = plain or (distance, level)
            difference, error = distance.value - plain[0].value, paired_error(distance, plain[0])
            print(f"{schedule:8}  {name:13}  {difference:+10.3f} +- {error:.3f}  {level / plain[1]:11.3f}", flush=True)


if __name__ == "__main__":
    main()
