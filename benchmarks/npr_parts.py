"""What a variance does to samples, in parts: its pattern over pixels, its level, and where it is drawn.

    python benchmarks/npr_parts.py --data data/fashion-mnist [--bundle fashion] [--samples 512] [--steps 10]
    python benchmarks/npr_parts.py --data data/fashion-mnist --method NPR-DDIM --rows "no noise" NPR "NPR above 3"

Against the analytic variance, which has one level per time and no pattern, stand those of NPR and SN; the pattern of
one at the level of another; and a level, image by image, without a pattern. On images of the data set the levels agree;
on images that are being drawn they may differ. Other rows draw half of NPR's noise, or draw it at some ratios of noise
to signal only. Any row may leave x_0 unclipped until the last step. All start from the same noise, so that differences
of distances have errors below those of the distances. The level shown is that of the last step that is not capped,
relative to the first row's. --record FILE keeps the rows as lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov import bundle
from optcov.bundle import Bundle
from optcov.bundle.conditions import labels_in_rows
from optcov.covariances import Covariance, find_covariance
from optcov.data import ImageSet, load, to_8bit
from optcov.gaussian import Diagonal
from optcov.metrics import Distance, FeatureStatistics, find_extractor, jackknife_error, measure_frechet
from optcov.prediction import Prediction
from optcov.reverse import ReverseProcess, Step
from optcov.sampling import generate
from optcov.trajectory import sigma_of


def variance(model: Bundle, name: str, prediction: Prediction) -> Tensor:
    """v of one kind, (B, *D)."""
    if name == "analytic":
        number = model.per_time("mean_square_noise")(prediction.t)
        return (prediction.factor("noise") * (1 - number)).to(prediction.x_t).expand_as(prediction.x_t)
    return find_covariance(name)().second_moment(prediction).diagonal(prediction.x_t).expand_as(prediction.x_t)


@final
class Parts(Covariance):
    """The pattern of one variance, if any, at the level of another, image by image; 0 outside a range of noise."""

    def __init__(
        self,
        model: Bundle,
        level: str,
        pattern: str | None = None,
        low: float = 0,
        high: float = math.inf,
        share: float = 1,
    ):
        self._model, self._level, self._pattern, self._range, self._share = model, level, pattern, (low, high), share

    def second_moment(self, prediction: Prediction) -> Diagonal:
        low, high = self._range
        if not low < sigma_of(self._model.schedule, float(prediction.t)) <= high:
            return Diagonal(torch.zeros_like(prediction.x_t))
        level = self._share * _mean(variance(self._model, self._level, prediction))
        if self._pattern is None:
            return Diagonal(level.expand_as(prediction.x_t))
        v = variance(self._model, self._pattern, prediction)
        return Diagonal(v / _mean(v) * level)


def _mean(v: Tensor) -> Tensor:
    return v.mean(dim=(1, 2, 3), keepdim=True)


PARTS: dict[str, tuple[str, str | None]] = {  # level, pattern
    "analytic": ("analytic", None),
    "NPR": ("npr", "npr"),
    "NPR's pattern": ("analytic", "npr"),
    "NPR's level": ("npr", None),
    "SN": ("sn", "sn"),
    "SN's level, NPR's pattern": ("sn", "npr"),
    "NPR's level, SN's pattern": ("npr", "sn"),
}
RANGES: dict[str, tuple[float, ...]] = {  # ratios of noise to signal where NPR's noise is drawn, and how much of it
    "no noise": (math.inf, math.inf),
    "NPR above 3": (3, math.inf),
    "NPR from 0.3 to 3": (0.3, 3),
    "NPR below 0.3": (0, 0.3),
    "half of NPR": (0, math.inf, 0.5),
}
UNCLIPPED = ", not clipped"  # x_0 is clipped in the last step only
ROWS = [name + end for end in ("", UNCLIPPED) for name in (*PARTS, *RANGES)]


def process_of(model: Bundle, method: str, row: str) -> ReverseProcess:
    """The reverse process of a row."""
    name = row.removesuffix(UNCLIPPED)
    parts = PARTS[name] if name in PARTS else ("npr", "npr", *RANGES[name])
    return model.reverse_process(method, covariance=Parts(model, *parts), clip_mean=name == row)


def draw(model: Bundle, row: str, options: argparse.Namespace) -> tuple[Tensor, float]:
    """Images (B, *D), and the mean variance of the last step that is not capped."""
    process = process_of(model, options.method, row)
    trajectory = model.trajectory(options.steps)
    found: list[float] = []

    def watch(step: Step) -> None:
        if step.s == trajectory.times[1]:
            found.append(float(step.gaussian.variance.mean()))

    cap = model.noise_cap(options.method)
    told = labels_in_rows(model.class_numbers, options.samples)
    shared: dict[str, Any] = {"noise_cap": cap, "callback": watch, "condition": told, "seed": options.seed}
    drawn = generate(process, trajectory, model.image_shape, options.samples, **shared)
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
    parser.add_argument("--method", default="NPR-DDPM", help="whose process and noise cap; NPR-DDIM is the other")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", nargs="+", default=["linear"])
    parser.add_argument(
        "--rows",
        nargs="+",
        default=list(PARTS),
        choices=ROWS,
        help="which; differences are from the first",
    )
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*outside those the network was trained on")  # cosine, first step
    extractor = find_extractor("fashion")
    reference = FeatureStatistics.of(extractor.features(load(options.data)))
    lines = []
    print(f"schedule  covariance                 distance   less {options.rows[0]}        level")
    for schedule in options.schedules:
        model = bundle.load(options.bundle).with_schedule(schedule)
        plain: tuple[Distance, float] | None = None
        for name in options.rows:
            images, level = draw(model, name, options)
            features = extractor.features(ImageSet(to_8bit(images), None, name))
            rows = torch.argsort(torch.arange(len(features)) % max(1, len(model.class_numbers)), stable=True)
            distance = measure_frechet(features[rows], reference, mix=False)
            plain = plain or (distance, level)
            difference, error = distance.value - plain[0].value, paired_error(distance, plain[0])
            relative = level / plain[1] if plain[1] else None
            found = {"difference": difference, "standard_error": error, "level": relative}
            settings = {key: getattr(options, key) for key in ("bundle", "method", "samples", "steps", "seed")}
            lines.append(
                {
                    "schedule": schedule,
                    "row": name,
                    "model": model.digest()[:12],
                    **settings,
                    "limit": distance.limit,
                    **found,
                }
            )
            print(
                f"{schedule:8}  {name:26}  {distance.limit:7.4f}  {difference:+8.4f} +- {error:.4f}  "
                f"{'' if relative is None else format(relative, '7.3f')}",
                flush=True,
            )
    if options.record:
        options.record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
