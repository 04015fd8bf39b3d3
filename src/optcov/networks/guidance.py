"""Classifier-free guidance (Ho and Salimans 2022): the prediction moves away from that without a condition.

    output = empty + w (conditional - empty)

Every kind of output is linear in x0_hat and eps_hat at a given x_t, so that it does not matter which is mixed. What the
heads say is that of the conditional prediction: w = 1 is the conditional network itself. With any other w the mean is
no conditional mean of x_0 any more, so that no covariance is optimal for it in the sense of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from optcov.prediction import Network, NoisePrediction, Prediction
from optcov.schedule import Time

LARGEST = 1e4  # of a weight: beyond, predictions leave the range of float32


@final
class Guided:
    """A network (x_t, t, **condition) -> prediction whose two halves are evaluated as one batch.

    empty_condition: what stands for no condition, each (1, ...).

    >>> from optcov import Schedule, oracle
    >>> data = oracle.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.1, 0.1], labels=[0, 1])
    >>> guided = Guided(data.network(Schedule.linear()), 3.0, {"class_labels": torch.tensor([2])})
    >>> guided(torch.zeros(4, 1), 500, class_labels=torch.tensor([0, 0, 1, 1])).noise.shape
    torch.Size([4, 1])
    """

    def __init__(self, network: Network, guidance: float, empty_condition: Mapping[str, Tensor]):
        self.network, self.guidance = network, check_guidance(guidance)
        self.empty_condition = dict(empty_condition)
        if not self.empty_condition:
            raise ValueError("guidance needs an empty condition to move away from, and this network has none")

    def __call__(self, x_t: Tensor, t: Time, **condition: Tensor) -> NoisePrediction | Prediction:
        if not condition:
            raise ValueError(
                f"guidance moves towards a condition, but none is given; pass {', '.join(self.empty_condition)}"
            )
        count = len(x_t)
        both = {name: torch.cat([value, self._empty(name, value)]) for name, value in condition.items()}
        times = torch.cat([t, t]) if isinstance(t, Tensor) and t.ndim and len(t) == count else t
        answer = self.network(torch.cat([x_t, x_t]), times, **both)
        if isinstance(answer, NoisePrediction):
            signal, spread = torch.ones(()), torch.ones(())  # which an answer in noise does not need
            answer = Prediction.of(answer, torch.cat([x_t, x_t]), times, signal, spread)
        return self._mixed(answer, x_t, t)

    def _mixed(self, answer: Prediction, x_t: Tensor, t: Time) -> Prediction:
        count = len(x_t)
        own, empty = answer.output[:count], answer.output[count:]
        mixed = replace(
            answer,
            x_t=answer.x_t[:count],
            t=t,
            output=torch.lerp(empty, own, self.guidance),
            signal=_half(answer.signal, count),
            spread=_half(answer.spread, count),
            unguided=own,
        )
        heads = {name: value[:count] for name, value in answer.heads.items()}
        return mixed.with_heads(heads, answer.units, answer.excesses)

    def _empty(self, name: str, value: Tensor) -> Tensor:
        empty = self.empty_condition.get(name)
        if empty is None or empty.shape[1:] != value.shape[1:]:
            known = "there is none" if empty is None else f"the empty one has {tuple(empty.shape[1:])}"
            raise ValueError(
                f"condition {name!r} has entries of shape {tuple(value.shape[1:])}, but {known}; guidance needs "
                f"both of one shape"
            )
        return empty.to(value).expand(len(value), *value.shape[1:])


def check_guidance(guidance: Any) -> float:
    """A weight of guidance, or a ValueError: 0 leaves the condition out, 1 is the condition alone."""
    if not isinstance(guidance, Real) or isinstance(guidance, bool) or not 0 <= float(guidance) <= LARGEST:
        raise ValueError(
            f"guidance = {guidance!r} is no weight; pass a number from 0 to {LARGEST:g}, such as 3.0 (1: no guidance)"
        )
    return float(guidance)


def refuse_guided(network: object) -> None:
    """Refuse a guided network where a likelihood is asked for, whatever else it is."""
    if isinstance(network, Guided) and network.guidance != 1:
        raise ValueError(
            f"guidance = {network.guidance:g} has no likelihood: the guided prediction is that of no model of the "
            f"data; score with guidance 1"
        )


def _half(level: Tensor, count: int) -> Tensor:
    return level[:count] if level.ndim and len(level) == 2 * count else level
