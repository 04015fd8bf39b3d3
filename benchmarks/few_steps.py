"""Few steps: Bridge 2M, Matched 2M and what they are made of, beside diffusers' solvers, by the distance of images.

    python benchmarks/few_steps.py --data data/fashion-mnist --out runs/few-steps [--steps 10] [--samples 2000]
    python benchmarks/few_steps.py --data data/fashion-mnist --out runs/few-steps --table   of what was drawn

All rows start from the same noise, each class in turn. Shift, gain and power are measured on training images and on
start noises of their own; the distance is to the test images. Drawn features are kept in --out, so that an interrupted
run goes on. Another model: --bundle cifar10 --data data/cifar10.npz --features lite0. By FID: --features inception
--reference measurements/fid/cifar10-train.npz, or a file of `optcov statistics --rows 10000`, which gives KID too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

import optcov
from optcov import ForwardProcess, ReverseProcess, data
from optcov.bundle import Bundle
from optcov.bundle.conditions import labels_in_rows
from optcov.bundle.matched import from_file, times_of, to_file
from optcov.data import ImageSet, to_8bit
from optcov.gaussian import Diagonal, Gaussian
from optcov.metrics import FeatureStatistics, jackknife_error, measure_frechet
from optcov.metrics.extractors import find_extractor
from optcov.metrics.frechet import GROUPS, Distance
from optcov.metrics.kernel import KernelSide, measure_kernel
from optcov.metrics.sources import features_of
from optcov.noise import batch_noise
from optcov.prediction import Prediction, take
from optcov.schedule import Schedule
from optcov.solvers import (
    BridgeNoise,
    DataMoments,
    MultistepNoise,
    few_step_times,
    match_noise,
    multistep_sample,
    peer,
)
from optcov.solvers.multistep import FIRST_SIGMA
from optcov.storage import read_tensors, write_tensors
from optcov.trajectory import Trajectory, sigma_of

PEERS = ("UniPC", "DPM-Solver++")
KARRAS = ("UniPC, Karras times", "DPM-Solver++, Karras times")  # diffusers' own
COMPARED = (*PEERS, "UniPC, Karras times")  # what each row is compared with, unless told otherwise
TRAINING_IMAGES = 20_000
CALIBRATION = 256  # start noises
BATCH = 64


def matched_times(bundle: Bundle, K: int) -> Trajectory:
    """Those of Matched 2M: they end earlier if there are few of them."""
    return times_of(bundle.schedule, K)


def default_times(bundle: Bundle, K: int) -> Trajectory:
    """Those of Bridge 2M."""
    return few_step_times(bundle.schedule, K, bundle.image_shape)


def largest_times(bundle: Bundle, K: int) -> Trajectory:
    """Those of Bridge 2M for large images: the first step starts at a noise-to-signal ratio of 160, if there is one."""
    return few_step_times(bundle.schedule, K)


def times_from(last: float) -> Any:
    """Those of Bridge 2M from another noise-to-signal ratio."""
    return lambda bundle, K: Trajectory.karras(bundle.schedule, K, first_sigma=FIRST_SIGMA, last_sigma=last)


def times_down_to(first: float) -> Any:
    """Those of Bridge 2M down to another noise-to-signal ratio."""

    def times(bundle: Bundle, K: int) -> Trajectory:
        last = sigma_of(bundle.schedule, default_times(bundle, K).times[-1])
        return Trajectory.karras(bundle.schedule, K, first_sigma=first, last_sigma=last)

    return times


def even_times(bundle: Bundle, K: int) -> Trajectory:
    """Evenly spaced, as diffusers' solvers visit them by default."""
    return Trajectory.even(bundle.schedule, K)


@dataclass(frozen=True)
class AroundBridge:
    """Bridge 2M with something changed."""

    plain: BridgeNoise

    @property
    def schedule(self) -> Schedule:
        return self.plain.schedule

    @property
    def trajectory(self) -> Trajectory:
        return self.plain.trajectory

    def check_shape(self, shape: Sequence[int]) -> None:
        pass


@final
@dataclass(frozen=True)
class HeadNoise(AroundBridge):
    """Bridge 2M with a share of gamma^2 v beside its own noise, v by the NPR head: noise that has its place."""

    process: ReverseProcess
    share: float
    condition: dict[str, Tensor]

    def step(self, current: Prediction, s: float, previous: Prediction | None = None) -> Gaussian:
        step = self.plain.step(current, s, previous)
        bridge = ForwardProcess(self.schedule, self.plain.eta).bridge(float(current.t), s)
        v = self.process.posterior(current.x_t, float(current.t), **self.condition).variance
        return Gaussian(step.mean, Diagonal(step.variance + self.share * float(bridge.clean_weight) ** 2 * v))

    def identity(self) -> dict[str, float]:
        return {"eta": self.plain.eta, "share": self.share}


@final
@dataclass(frozen=True)
class EtaBySigma(AroundBridge):
    """Bridge 2M with one eta for steps that start above a noise-to-signal ratio of 1, and another for those below."""

    above: float
    below: float

    def step(self, current: Prediction, s: float, previous: Prediction | None = None) -> Gaussian:
        eta = self.above if sigma_of(self.schedule, float(current.t)) > 1 else self.below
        return replace(self.plain, eta=eta).step(current, s, previous)

    def identity(self) -> dict[str, float]:
        return {"above": self.above, "below": self.below}


ROWS: dict[str, dict[str, Any]] = {
    "Bridge 2M": {"eta": 0.3, "matched": False},
    "Bridge 2M, eta near 0, first step at 160": {"eta": 1e-4, "matched": False, "times": largest_times},
    "Bridge 2M, first step at 160": {"eta": 0.3, "matched": False, "times": largest_times},
    "Bridge 2M, times to 1 / K": {"eta": 0.3, "matched": False, "times": matched_times},
    **{
        f"Bridge 2M, first step at {last}": {"eta": 0.3, "matched": False, "times": times_from(last)}
        for last in (80, 40, 20)
    },
    **{
        f"Bridge 2M, last step at {first}": {"eta": 0.3, "matched": False, "times": times_down_to(first)}
        for first in (0.15, 0.3)
    },
    "Bridge 2M, eta near 0, last step at 0.3": {"eta": 1e-4, "matched": False, "times": times_down_to(0.3)},
    "Bridge 2M, even timesteps": {"eta": 0.3, "matched": False, "times": even_times},
    **{
        f"Bridge 2M, {share} of the head's noise": {"eta": 0.3, "matched": False, "head": share} for share in (0.1, 0.3)
    },
    **{
        f"Bridge 2M, eta {above} above a ratio of 1, {below} below": {"etas": (max(above, 1e-4), max(below, 1e-4))}
        for above, below in ((0.6, 0.0), (0.3, 0.0), (0.0, 0.3), (0.0, 0.6))
    },
    "Matched 2M": {"eta": 0.3, "times": matched_times},
    "Matched 2M, times of Bridge 2M": {"eta": 0.3},
}
EVERY = (*PEERS, *KARRAS, *ROWS)


def in_turn(bundle: Bundle, images: range) -> dict[str, Tensor]:
    """The condition of images by number: each class in turn."""
    return take(labels_in_rows(bundle.class_numbers, images.stop), torch.arange(images.start, images.stop))


def noise_of(bundle: Bundle, moments: DataMoments, K: int, row: dict[str, Any], path: Path) -> MultistepNoise:
    """What a row draws with; kept at the path."""
    if path.exists():
        return from_file(*read_tensors(path), bundle.image_shape)[0]
    options = dict(row)
    trajectory = options.pop("times", default_times)(bundle, K)
    if "etas" in options:
        return EtaBySigma(BridgeNoise(bundle.schedule, trajectory), *options["etas"])
    if "head" in options:
        return HeadNoise(
            BridgeNoise(bundle.schedule, trajectory, options["eta"]),
            bundle.reverse_process("NPR-DDPM", all_heads=False),
            options["head"],
            {},
        )
    if not options.pop("matched", True):
        return BridgeNoise(bundle.schedule, trajectory, options["eta"])
    options |= {"samples": CALIBRATION, "condition": in_turn(bundle, range(CALIBRATION))}
    found = match_noise(bundle.network.with_only_heads(), bundle.schedule, trajectory, moments, **options)
    write_tensors(path, *to_file([found]))
    return found


def drawn(bundle: Bundle, name: str, noise: MultistepNoise | None, K: int, images: range) -> Tensor:
    """Images by number, as every row draws them: from the same noise."""
    network = bundle.network.with_only_heads()
    start, condition = batch_noise(0, images, 0, bundle.image_shape), in_turn(bundle, images)
    if noise is None:
        return peer(name, network, bundle.schedule, start, K, indices=images, condition=condition).x_0
    if isinstance(noise, HeadNoise):
        noise = replace(noise, condition=condition)
    options: dict[str, Any] = {"indices": images, "data_range": bundle.data_range, "condition": condition}
    return multistep_sample(network, noise, start, **options).x_0


def path_of(out: Path, name: str, K: int) -> Path:
    """Where the features of a cell are kept."""
    plain = "".join(c if c.isalnum() or c in "+.=" else "-" for c in name)
    return out / f"{plain}-{K}.safetensors"


def fill(bundle: Bundle, moments: DataMoments, name: str, K: int, options: argparse.Namespace) -> None:
    """Draw what a cell lacks."""
    path, samples, first = path_of(options.out, name, K), options.samples, options.first
    extractor = find_extractor(options.features)
    features = read_tensors(path)[0]["features"] if path.exists() else torch.zeros(0)
    if len(features) >= samples:
        return
    noise = None if name in (*PEERS, *KARRAS) else noise_of(bundle, moments, K, ROWS[name], path.with_suffix(".noise"))
    while len(features) < samples:
        images = range(len(features), min(len(features) + BATCH, samples))
        x_0 = drawn(bundle, name, noise, K, range(first + images.start, first + images.stop))
        new = extractor.features(ImageSet(to_8bit(x_0), None, name))
        features = torch.cat([features, new]) if len(features) else new
        write_tensors(path, {"features": features})


def difference(ours: Distance, theirs: Distance) -> tuple[float, float]:
    """The difference of the limits, and its standard error by paired groups."""
    pairs = zip(ours.replicates, theirs.replicates, strict=True)
    error = jackknife_error([[a - b for a, b in zip(*sides, strict=True)] for sides in pairs if sides[0]])
    assert ours.limit is not None
    assert theirs.limit is not None
    return ours.limit - theirs.limit, error


def mean_part(rows: Tensor, reference: FeatureStatistics) -> Distance:
    """The part of a Frechet distance that the means make, with the same groups: |mean - mean|^2."""
    values = rows.double()
    gaps = [values[torch.arange(len(rows)) % GROUPS != group].mean(0) - reference.mean for group in range(GROUPS)]
    without = tuple(float(gap.square().sum()) for gap in gaps)
    value = float((values.mean(0) - reference.mean).square().sum())
    limit = value - (GROUPS - 1) * (sum(without) / GROUPS - value)
    return Distance(value, jackknife_error([without]), limit, (len(rows), reference.count), (without, ()))


def measured(
    out: Path, reference: FeatureStatistics, K: int, classes: int, against: Sequence[str], names: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """All cells of K steps; each is compared with others on as many samples as they have in common."""
    measures: dict[str, Callable[[Tensor], Distance]] = {
        "": lambda rows: measure_frechet(rows, reference, mix=False),
        "means": lambda rows: mean_part(rows, reference),
    }
    if reference.rows is not None:
        images = KernelSide.of(reference.rows)
        measures["kernel"] = lambda rows: measure_kernel(KernelSide.of(rows, mix=False), images)

    @cache  # a distance takes a minute in many features
    def distance(file: Path, count: int, kind: str) -> Distance:
        rows = torch.argsort(torch.arange(count) % classes, stable=True)  # groups that are left out have all classes
        return measures[kind](read_tensors(file)[0]["features"][rows])

    def compared(name: str, count: int, kind: str) -> dict[str, Any]:
        ours, *theirs = (distance(path_of(out, n, K), count, kind) for n in (name, *against))
        gaps = {peer: difference(ours, d) for peer, d in zip(against, theirs, strict=True) if peer != name}
        found = {"limit": ours.limit, "standard_error": ours.standard_error, "differences": gaps}
        return found if kind else {**found, "replicates": ours.replicates}

    for name in names:
        files = [path_of(out, n, K) for n in (name, *against)]
        if not all(file.exists() for file in files):
            continue
        count = min(len(read_tensors(file)[0]["features"]) for file in files)
        cell = {"row": name, "steps": K, "samples": count, **compared(name, count, "")}
        yield cell | {kind: compared(name, count, kind) for kind in measures if kind}


def table(cells: Iterable[dict[str, Any]], against: Sequence[str]) -> str:
    """Cells as a table."""
    lines = [f"| | samples | distance | {' | '.join(f'from {name}' for name in against)} |"]
    lines.append("|---|---:|---:" + "|---:" * len(against) + "|")
    for cell in cells:
        gaps = [_words(*cell["differences"][peer]) if peer in cell["differences"] else "" for peer in against]
        number = f"{cell['limit']:.3f} ± {cell['standard_error']:.3f}"
        lines.append(f"| {cell['row']} | {cell['samples']:,} | {number} | {' | '.join(gaps)} |")
    return "\n".join(lines).replace("-0.", "−0.").replace("= -", "= −")


def _words(gap: float, error: float) -> str:
    return f"{gap:+.3f} ± {error:.3f} (z = {gap / error:+.1f})"


def main() -> None:
    """Draw what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="the model's data: a directory or a file, as optcov reads it")
    parser.add_argument("--bundle", default="fashion")
    parser.add_argument("--features", default="fashion")
    parser.add_argument("--out", type=Path, required=True, help="where features are kept")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 25])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first image; others have other noise")
    parser.add_argument("--row", action="append", help="a row alone; all of them by default")
    parser.add_argument("--against", action="append", help="a row to compare with; by default diffusers' solvers")
    parser.add_argument("--schedule", default="linear")
    parser.add_argument(
        "--reference", help="a file of statistics to measure the distance to; by default the test images"
    )
    parser.add_argument("--table", action="store_true", help="draw nothing")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--record", type=Path, help="write all cells of the tables to this file, a line of JSON each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bundle = optcov.load(options.bundle, schedule=options.schedule)
    if not options.table:  # several processes may draw, each its own rows
        moments = DataMoments.of(data.load(options.data, "train").x_0()[:TRAINING_IMAGES])
        for K in options.steps:
            for name in options.row or EVERY:
                fill(bundle, moments, name, K, options)
    if options.draw:
        return
    against = options.against or COMPARED
    for K in options.steps:
        for name in against:
            if not path_of(options.out, name, K).exists():
                parser.error(f"{name} in {K} steps is not drawn, and others are compared with it: draw it by --row")
    extractor, classes = find_extractor(options.features), max(1, len(bundle.class_numbers))
    known = options.reference and features_of(options.reference, extractor)
    if not isinstance(known, FeatureStatistics):
        known = FeatureStatistics.of(extractor.features(data.load(options.data, "test")))
    cells = [list(measured(options.out, known, K, classes, against, EVERY)) for K in options.steps]
    for K, found in zip(options.steps, cells, strict=True):
        print(f"\nK = {K}\n\n{table(found, against)}")
    if options.record:
        options.record.write_text("".join(json.dumps(cell) + "\n" for found in cells for cell in found))


if __name__ == "__main__":
    main()
