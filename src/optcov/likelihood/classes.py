"""A generative classifier: the bound of an image given each class, by Bayes' rule with classes that are equally likely.

    log p(class | x_0) = log_softmax over classes of -bound(x_0 | class)

All classes see the same noise, so that most of its randomness cancels in their differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from optcov.likelihood.elbo import elbo
from optcov.likelihood.statistics import Estimate, estimate
from optcov.reverse import ReverseProcess
from optcov.trajectory import Trajectory

BINS = 10  # of the confidence, for the calibration
TIE = 2.0  # standard errors within which two classes tie


def class_bounds(
    process: ReverseProcess,
    x_0: Tensor,
    trajectory: Trajectory,
    classes: Sequence[int],
    **options: Any,
) -> Tensor:
    """-ELBO of images x_0 (B, *D) given each of the classes, in nats, float64 (B, classes).

    options: those of `elbo`, such as seed and images.
    """
    if "noise" not in options:
        options = {"images": range(len(x_0)), **options}
    columns = []
    for label in classes:
        told = {"class_labels": torch.full((len(x_0),), label, device=x_0.device)}
        columns.append(elbo(process, x_0, trajectory, condition=told, **options).total)
    return torch.stack(columns, 1)


@final
@dataclass(frozen=True)
class Classification:
    """How well classes were told apart. Make one by `Classification.of`."""

    accuracy: Estimate  # share of images whose most likely class is their own
    calibration_error: float  # expected: |confidence - accuracy|, averaged over bins of the confidence
    predicted: Tensor  # column of the most likely class, (B,)
    ties: Tensor | None  # whether the two most likely classes differ by less than the error of the bound, (B,)

    @staticmethod
    def of(log_probabilities: Tensor, labels: Tensor) -> Classification:
        """Judge log-probabilities (B, classes), or those of several seeds (R, B, classes), by columns of labels (B,).

        Several seeds are averaged, and tell the error of the bound, without which no ties are known.
        """
        repeats = log_probabilities.double().cpu()
        repeats = repeats[None] if repeats.ndim == 2 else repeats
        labels = torch.as_tensor(labels).cpu()
        if repeats.ndim != 3 or labels.shape != repeats.shape[1:2] or len(labels) == 0:
            raise ValueError(
                f"log-probabilities of shape {tuple(log_probabilities.shape)} and labels of shape "
                f"{tuple(labels.shape)} do not belong together; pass (B, classes) or (seeds, B, classes), and (B,)"
            )
        mean = repeats.mean(0).log_softmax(1)
        confidence, predicted = mean.exp().max(1)
        right = (predicted == labels).double()
        return Classification(estimate(right), _calibration_error(confidence, right), predicted, _ties(repeats))

    def __str__(self) -> str:
        ties = "" if self.ties is None else f", {int(self.ties.sum())} of {len(self.ties)} images tie"
        return f"accuracy {self.accuracy}, calibration error {self.calibration_error:.3f}{ties}"


def _calibration_error(confidence: Tensor, right: Tensor) -> float:
    part = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, part, confidence - right)
    return float(gaps.abs().sum() / len(right))


def _ties(repeats: Tensor) -> Tensor | None:
    seeds = len(repeats)
    if seeds < 2 or repeats.shape[2] < 2:
        return None
    best = repeats.mean(0).topk(2, dim=1).indices  # (B, 2)
    gaps = repeats.gather(2, best.expand(seeds, *best.shape)).diff(dim=2)[..., 0]  # (R, B)
    return gaps.mean(0).abs() < TIE * gaps.std(0) / math.sqrt(seeds)
