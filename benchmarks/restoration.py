"""Compare ways to restore images: python benchmarks/restoration.py measurements/restoration/fashion.jsonl.

Four tasks on held-out images of an embedded model, all methods with the same network, times and noise. The file gets
one line per task, method and group of images, so that a stopped run goes on. DPS, DiffPIR and MMPS are tuned: the best
of a few strengths, by PSNR on images that are not scored; the strength of MMPS is the iterations of its solver. The
coverage of a mask is that of its hidden pixels. MMPS is azula's, and optional: it comes last.
scripts/restoration_tables.py makes tables of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov import data
from optcov.bundle import Bundle, load, test_images
from optcov.data import ImageSet, to_8bit
from optcov.inverse import Average, Blur, Mask, Operator, Restoration, restore
from optcov.inverse.scores import coverage, crps, psnr
from optcov.metrics.extractors import Extractor, find_extractor

NOISE_STD = 0.05
MMPS = "MMPS, azula"
STRENGTHS = {"DPS": (1.0, 3.0, 10.0, 30.0), "DiffPIR": (1.0, 10.0, 100.0), MMPS: (1.0, 3.0, 5.0)}
METHODS: dict[str, dict[str, Any]] = {
    "CNPR, guidance": {"method": "CNPR-DDPM", "way": "guidance"},
    "NPR, guidance": {"method": "NPR-DDPM", "way": "guidance"},
    "PiGDM": {"method": "PiGDM"},
    "DPS": {"method": "DPS"},
    "CNPR, proximal": {"method": "CNPR-DDPM", "way": "proximal"},
    "NPR, proximal": {"method": "NPR-DDPM", "way": "proximal"},
    "DiffPIR": {"method": "DiffPIR"},
    MMPS: {},
}


def tasks(shape: tuple[int, ...]) -> dict[str, Operator]:
    """The operators, by name."""
    side = shape[-1]
    box = side // 2 - side % 4 // 2
    return {
        "box": Mask.box(shape, (side - box) // 2, (side - box) // 2, box, box),
        "random 70 %": Mask.random(shape, 0.7),
        "blur 1.5": Blur.gaussian(shape, 1.5),
        "4 x smaller": Average(shape, 4),
    }


def measured(operator: Operator, images: Tensor, first: int) -> Tensor:
    """Measurements with noise; those of an image do not depend on its group."""
    rows = []
    for number, image in enumerate(images):
        seen = operator.apply(image[None])[0]
        noise = torch.randn(seen.shape, generator=torch.Generator().manual_seed(first + number))
        rows.append(seen + NOISE_STD * noise * operator.seen.to(seen))
    return torch.stack(rows)


class Comparison:
    """All that is restored and scored, kept line by line in a file."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.model: Bundle = load(options.bundle)
        self._digest = self.model.digest()[:12]
        self.images = held_out(options)
        self.operators = tasks(tuple(self.model.image_shape))
        self._extractor = find_extractor("fashion" if options.bundle == "fashion" else "lite0")
        self._unit = spread(self._extractor, self.images)
        self._lines = [json.loads(line) for line in _text(options.out).splitlines()]
        self._chosen = chosen(options)

    def run(self) -> None:
        """Restore what is missing of the chosen rows.

        Group by group, so that a stopped run has compared all methods; MMPS last, so that none waits for it.
        """
        for names in (self._chosen - {MMPS}, self._chosen & {MMPS}):
            for numbers, task, name in product(self._groups(), self.operators, METHODS):
                if name in names:
                    self._line(task, name, numbers, strength=self._strength(task, name))

    def _groups(self) -> list[range]:
        """The numbers of the images of each group."""
        told = self.options
        end = told.first + told.images
        return [range(first, min(first + told.group, end)) for first in range(told.first, end, told.group)]

    def _strength(self, task: str, name: str) -> float | None:
        """The best on images that are not scored, for methods that have one."""
        if name not in STRENGTHS:
            return None
        last = range(len(self.images) - self.options.tuning, len(self.images))
        trials = {strength: self._line(task, name, last, strength=strength) for strength in STRENGTHS[name]}
        return max(trials, key=lambda strength: sum(trials[strength]["psnr"]))

    def _line(self, task: str, name: str, numbers: range, *, strength: float | None) -> dict[str, Any]:
        """The line of a group: found, or made and written."""
        told = self.options
        size = {"bundle": told.bundle, "model": self._digest, "samples": told.samples, "steps": told.steps}
        size |= {"noise": NOISE_STD}
        key = {**size, "task": task, "method": name, "strength": strength, "images": [numbers.start, len(numbers)]}
        for line in self._lines:
            if all(line[part] == value for part, value in key.items()):
                return line
        line = key | self._restored(task, name, numbers, {} if strength is None else {"strength": strength})
        self._lines.append(line)
        told.out.parent.mkdir(parents=True, exist_ok=True)
        with told.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def _restored(self, task: str, name: str, numbers: range, tuned: Mapping[str, Any]) -> dict[str, Any]:
        operator, truth, told = self.operators[task], self.images[numbers.start : numbers.stop], self.options
        y = measured(operator, truth, numbers.start)
        options: dict[str, Any] = {"steps": told.steps, "samples": told.samples, "batch_size": told.batch_size}
        way = by_mmps() if name == MMPS else restore
        began = time.process_time()
        found = way(self.model, y, operator, NOISE_STD, seed=numbers.start, **options, **METHODS[name], **tuned)
        seconds = time.process_time() - began
        drawn, known = to_8bit(found.samples), to_8bit(truth)  # the truth is no finer
        hidden = 1 - operator.mask if isinstance(operator, Mask) else torch.ones_like(truth[0])
        scores = {
            "psnr": psnr(found.mean, truth),
            "perceptual": perceptual(self._extractor, found.samples, truth) / self._unit,
            "cover50": mean_over(coverage(drawn, known, 0.5), hidden),
            "cover90": mean_over(coverage(drawn, known, 0.9), hidden),
            "crps": crps(found.samples, truth).flatten(1).mean(1),
            "residual": found.residual.square().mean(1).sqrt(),
        }
        rounded = {name: [round(float(value), 5) for value in values] for name, values in scores.items()}
        passes = {"evaluations": found.evaluations, "gradients": found.gradients}
        passes["unsolved"] = None if math.isnan(found.unsolved) else found.unsolved
        return rounded | passes | {"cpu_seconds": round(seconds, 2)}


def by_mmps() -> Callable[..., Restoration]:
    """The function that restores by MMPS; a ModuleNotFoundError if azula, or what it needs, is not installed."""
    from restoration_mmps import restore_by_mmps

    return restore_by_mmps


def chosen(options: argparse.Namespace) -> set[str]:
    """The rows to restore."""
    names = set(options.only or METHODS)
    if MMPS in names:
        try:
            by_mmps()
        except ModuleNotFoundError as error:
            note(f"{MMPS} is not restored: there is no module {error.name}; docs/install.md says how to install azula")
            names.remove(MMPS)
    return names


def note(sentence: str) -> None:
    """Say something that is no part of the tables."""
    print(sentence, file=sys.stderr, flush=True)


def mean_over(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of (B, *D) over the pixels, (B,)."""
    return (values * weights).flatten(1).sum(1) / weights.expand_as(values[0]).sum()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def features_of(extractor: Extractor, images: Tensor) -> Tensor:
    """Features (n, d) of images in [-1, 1]."""
    return extractor.features(ImageSet(to_8bit(images), None, "restored"))


def perceptual(extractor: Extractor, samples: Tensor, truth: Tensor) -> Tensor:
    """Mean squared distance of samples (B, S, *D) to the truth (B, *D) in features, (B,)."""
    drawn = features_of(extractor, samples.flatten(0, 1)).unflatten(0, samples.shape[:2])
    return (drawn - features_of(extractor, truth).unsqueeze(1)).square().mean((1, 2))


def spread(extractor: Extractor, images: Tensor) -> float:
    """Mean squared distance of two different images in features: 1 is then as far as an unrelated image."""
    return float(2 * features_of(extractor, images).var(0).mean())


def held_out(options: argparse.Namespace) -> Tensor:
    """Test images in [-1, 1]: those scored, and behind them those that strengths are chosen on."""
    wanted = options.first + options.images + options.tuning
    images = test_images(options.bundle) if options.data is None else data.load(options.data, "test").x_0()[:wanted]
    if len(images) < wanted:
        raise SystemExit(f"there are only {len(images)} images, {wanted} are asked for")
    return images[:wanted]


def main() -> None:
    """Restore what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file of lines")
    parser.add_argument("--bundle", default="fashion")
    parser.add_argument("--data", help="test images, such as data/cifar10.npz; by default those that come with it")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--first", type=int, default=16, help="the first image scored; those before served development")
    parser.add_argument("--tuning", type=int, default=8, help="images that strengths are chosen on")
    parser.add_argument("--samples", type=int, default=19)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--group", type=int, default=8, help="images in a line")
    parser.add_argument("--batch-size", type=int, default=36)
    parser.add_argument("--only", action="append", choices=METHODS, metavar="ROW", help="restore this row; repeatable")
    Comparison(parser.parse_args()).run()


if __name__ == "__main__":
    main()
