"""The tables of docs/results-restoration.md, made of the lines that benchmarks/restoration.py wrote.

    python scripts/restoration_tables.py measurements/restoration/fashion.jsonl     prints them

A line has the scores of a group of images, for one task and one method. Groups count if all methods have them. MMPS is
optional: it has a row if it has these groups, too. DPS, DiffPIR and MMPS were tried with several strengths on images
that are not scored; those lines serve to find the strength, and do not count.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

import torch
from torch import Tensor

TASKS = ("box", "random 70 %", "blur 1.5", "4 x smaller")
OURS = ("NPR, guidance", "CNPR, guidance")
BASELINES = ("DPS", "PiGDM")
NEEDED = ("CNPR, guidance", "NPR, guidance", "PiGDM", "DPS", "CNPR, proximal", "NPR, proximal", "DiffPIR")
CHEAPEST = "NPR, proximal"
OPTIONAL = "MMPS, azula"
SCORES = ("psnr", "perceptual", "cover50", "cover90", "crps")
LEVELS = {"cover50": 0.5, "cover90": 0.9}


@final
@dataclass(frozen=True)
class Comparison:
    """Scores by task, method and name, each with one number per image: (images,), the same images for all."""

    scores: Mapping[str, Mapping[str, Mapping[str, Tensor]]]
    passes: Mapping[str, str]  # evaluations of the network + passes back, by method
    time: Mapping[str, float]  # CPU time over that of the cheapest method, median over groups

    @staticmethod
    def of(path: Path) -> Comparison:
        """From a file of lines."""
        lines = whole_groups([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
        scores: dict[str, dict[str, dict[str, Tensor]]] = {}
        for line in lines:
            own = scores.setdefault(line["task"], {}).setdefault(line["method"], {})
            for name in SCORES:
                own[name] = torch.cat([own.get(name, torch.empty(0)), torch.tensor(line[name])]).double()
        cheapest = {_place(line): line["cpu_seconds"] for line in lines if line["method"] == CHEAPEST}
        ratios: dict[str, list[float]] = {}
        for line in lines:
            ratios.setdefault(line["method"], []).append(line["cpu_seconds"] / cheapest[_place(line)])
        passes = {line["method"]: f"{line['evaluations']} + {line['gradients']}" for line in lines}
        return Comparison(scores, passes, {name: median(found) for name, found in ratios.items()})

    @property
    def methods(self) -> list[str]:
        """In the order of the tables."""
        return [name for name in (*NEEDED, OPTIONAL) if name in self.passes]

    @property
    def images(self) -> int:
        """How many were scored."""
        return min((len(own["psnr"]) for task in self.scores.values() for own in task.values()), default=0)

    def gain(self, task: str, ours: str, other: str) -> tuple[float, float]:
        """How much higher the PSNR is, and its standard error, paired by image."""
        difference = self.scores[task][ours]["psnr"] - self.scores[task][other]["psnr"]
        return float(difference.mean()), float(difference.std() / len(difference) ** 0.5)

    def nearer(self, task: str, ours: str, other: str, name: str = "cover90", draws: int = 2000) -> tuple[float, float]:
        """How much nearer to its level the mean coverage is, and the error of that by a paired bootstrap."""
        found = torch.stack([self.scores[task][method][name] for method in (other, ours)])
        rows = torch.randint(found.shape[1], (draws, found.shape[1]), generator=torch.Generator().manual_seed(0))
        miss = (found.mean(1) - LEVELS[name]).abs()
        again = (found[:, rows].mean(2) - LEVELS[name]).abs()
        return float(miss[0] - miss[1]), float((again[0] - again[1]).std())


def whole_groups(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of groups that all methods have, by the first image; without those that only tried a strength."""
    found = Counter((*_place(line), line["method"]) for line in lines)
    tried = {place[1] for place, count in found.items() if count > 1}  # the images of several strengths
    scored = {place for place in found if place[1] not in tried}
    firsts = {first for _, first, _ in scored if all((task, first, m) in scored for task in TASKS for m in NEEDED)}
    with_optional = all((task, first, OPTIONAL) in scored for task in TASKS for first in firsts)
    methods = (*NEEDED, OPTIONAL) if with_optional else NEEDED
    kept = [line for line in lines if line["images"][0] in firsts and line["method"] in methods]
    return sorted(kept, key=lambda line: int(line["images"][0]))


def _place(line: Mapping[str, Any]) -> tuple[str, int]:
    """Task and first image."""
    return line["task"], line["images"][0]


def page_part(found: Comparison, wanted: int = 64) -> str:
    """All tables of a model, each with its title."""
    missing = "" if found.images >= wanted else f" The run is not complete: {wanted} images are planned."
    covered = "Coverage of the 90 % interval, in brackets of the 50 % interval:"
    titles = {
        f"{found.images} held-out images.{missing} PSNR of the mean in dB (higher is better):": _by_task(
            found, lambda own: _mean(own["psnr"], 2), costs=True
        ),
        covered: _by_task(found, lambda own: f"{own['cover90'].mean():.3f} ({own['cover50'].mean():.3f})"),
        "CRPS, in brackets the perceptual distance (lower is better):": _by_task(
            found, lambda own: f"{_mean(own['crps'], 3)} ({own['perceptual'].mean():.3f})"
        ),
        "Differences, paired by image. *Nearer*: by how much |coverage − 90 %| is smaller.": _gains(found),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in titles.items())


def _by_task(found: Comparison, words: Callable[[Mapping[str, Tensor]], str], costs: bool = False) -> str:
    header = ["method", *found.scores, *(("passes", "time") if costs else ())]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for method in found.methods:
        cells = [words(task[method]) for task in found.scores.values()]
        cells += [found.passes[method], f"{found.time[method]:.1f}"] if costs else []
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gains(found: Comparison) -> str:
    """Our two covariances against both baselines: PSNR, and how much nearer to 90 % the coverage is."""
    lines = [f"| | {' | '.join(found.scores)} |", "|---|" + "---:|" * len(found.scores)]
    for ours in OURS:
        for other in BASELINES:
            gains = [_signed(*found.gain(task, ours, other), 2) for task in found.scores]
            lines.append(f"| PSNR: {ours} minus {other} | {' | '.join(gains)} |")
    for ours in OURS:
        for other in BASELINES:
            nearer = [_signed(*found.nearer(task, ours, other), 3) for task in found.scores]
            lines.append(f"| nearer to 90 %: {ours} than {other} | {' | '.join(nearer)} |")
    return "\n".join(lines)


def _mean(values: Tensor, digits: int) -> str:
    return f"{values.mean():.{digits}f} ± {values.std() / len(values) ** 0.5:.{digits}f}"


def _signed(mean: float, error: float, digits: int) -> str:
    return f"{mean:+.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def main() -> None:
    """Print the tables of a file."""
    found = Comparison.of(Path(sys.argv[1]))
    if not found.images:
        sys.exit(f"no group of {sys.argv[1]} has all methods yet; let benchmarks/restoration.py go on")
    sys.stdout.write(page_part(found) + "\n")


if __name__ == "__main__":
    main()
