"""New heads for a network, with what they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from optcov.covariances import Covariance, Example, Regression, of_head
from optcov.fitting.config import TrainingError
from optcov.gaussian import mean_square
from optcov.networks import BackboneOutput, ConvHead, DenseHead, Form, Head, HeadedNetwork, ResidualHead, TimedHead
from optcov.networks.heads import HEADS
from optcov.prediction import check_condition
from optcov.schedule import Schedule


@final
@dataclass(frozen=True)
class HeadTask:
    """A head with the covariance that it is for, which knows what it learns."""

    module: Head
    covariance: type[Covariance]

    def regression(self, example: Example) -> Regression:
        """What the head is fitted on, in its unit."""
        if self.module.about == "prediction":
            return self.covariance.excess_regression(example, self.module.unit)
        return self.covariance.regression(example, self.module.unit)

    def scale(self, example: Example, regression: Regression) -> Tensor:
        """The order of the target of each sample, (B,), float64: what a timed head is relative to."""
        if regression.spread is not None:  # whose target may be negative
            return mean_square(example.residual(self.module.unit))
        return regression.target.double().flatten(1).mean(1)


def new_heads(
    network: HeadedNetwork,
    example: Tensor,
    names: Sequence[str],
    kind: str | None = None,
    loss: str = "gamma",
    seed: int = 0,
    condition: Mapping[str, Tensor] | None = None,
    output: BackboneOutput | None = None,
) -> dict[str, HeadTask]:
    """Fresh heads by name ("sn", "npr", "range") that fit the network's features.

    example: data (1, *D) of the shape to come. kind: "timed" | "deep" | "conv" | "residual" | "dense"; by default
    timed for images with loss "gamma", conv for images with loss "mse", and so for vectors before a named output
    layer, else dense. loss: "gamma" gives exponential outputs, "mse" the paper's linear ones; the learned range is a
    linear convolution head unless the others are residual or dense. A normalisation starts as the backbone's own, if
    the tapped module is one. Where the backbone was tapped at its output layer (`Backbone.of`), timed, deep and conv
    heads have that layer's form. condition: what the network is told about the example. output: what it gives for it,
    if that is known already.
    """
    if not names:
        raise TrainingError("there is no head to fit; choose some, such as sn and npr")
    kinds = {name: of_head(name) for name in names}  # refuses unknown ones
    for name, covariance in kinds.items():
        if covariance.target_can_be_negative and not covariance.target_spread_known and loss == "gamma":
            raise TrainingError(f'the target of the head {name!r} can be negative, which loss "gamma" cannot fit')
    if output is None:
        with torch.no_grad():
            told = check_condition(condition, len(example))
            output = network.features(example, network.schedule.final_time, **told)
    vectors, layered = example.ndim == 2, network.backbone.output_tap is not None
    possible = ("timed", "deep", "conv") if vectors and layered else ("timed", "deep", "conv", "residual")
    possible = ("dense", *(possible if layered else ())) if vectors else possible
    if kind is not None and kind in (*HEADS, "deep") and kind not in possible:
        raise TrainingError(
            f"heads of kind {kind!r} do not read features of shape {tuple(output.features.shape)}; "
            f"choose {' or '.join(possible)}"
        )
    if kind == "deep" and not all(covariance.has_posterior for covariance in kinds.values()):
        raise TrainingError("the head 'range' has no hidden layers; fit it in a second call, with kind timed")
    kind = kind or ("dense" if vectors and not layered else "timed" if loss == "gamma" else "conv")
    tasks: dict[str, HeadTask] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            head = _new_head(network, output, example, *_choose(kinds[name], kind, loss))
            _share_hidden_layers(head, tasks)
            head.unit = _unit(kinds[name], head, network.schedule)
            head.about = kinds[name].about if isinstance(head, TimedHead) else "zero"
            tasks[name] = HeadTask(head.to(example.device), kinds[name])
    return tasks


def _unit(covariance: type[Covariance], head: Head, schedule: Schedule) -> str:
    """The covariance's own unit for timed heads, and where no signal is left; the paper's for its own heads."""
    vanishes = bool(schedule.alpha_bar(schedule.final_time) == 0)
    return covariance.unit if isinstance(head, TimedHead) or vanishes else "noise"


def _choose(covariance: type[Covariance], kind: str, loss: str) -> tuple[str, str]:
    """Kind and output transform of a head."""
    if kind in ("timed", "deep"):
        if loss != "gamma":
            raise TrainingError(f'{kind} heads are positive, so they need loss "gamma"; use kind "conv" for "mse"')
        return (kind, "exp") if covariance.has_posterior else ("conv", "linear")
    return kind, "exp" if covariance.has_posterior and loss == "gamma" else "linear"


def _new_head(network: HeadedNetwork, output: BackboneOutput, example: Tensor, kind: str, transform: str) -> Head:
    features, channels = output.features.shape[1], example.shape[1]
    if kind == "dense":
        return DenseHead(features, channels, (128, 128), transform)
    tapped = network.backbone.module.get_submodule(network.backbone.tap or "")
    norm = tapped if isinstance(tapped, nn.GroupNorm) and tapped.num_channels == features else None
    largest = max(groups for groups in range(1, 33) if features % groups == 0)
    groups, eps = (largest, 1e-5) if norm is None else (norm.num_groups, norm.eps)
    tap = network.backbone.output_tap
    form = Form() if tap is None else tap.form(output.features, example)
    own = None if tap is not None and not tap.normalised else groups  # the layer reads the features as they are
    head: ConvHead | TimedHead | ResidualHead
    if kind in ("timed", "deep"):
        head = TimedHead(features, channels, own, eps, **vars(form), hidden=features if kind == "deep" else 0)
    elif kind == "conv":
        head = ConvHead(features, channels, own, eps, transform, **vars(form))
    elif kind == "residual":
        if output.time_embedding is None:
            raise TrainingError("residual heads need the backbone's time embedding; name its module in the Backbone")
        if form.patch > 1:
            raise TrainingError("residual heads need a network that sees single pixels; choose timed, deep or conv")
        head = ResidualHead(features, channels, output.time_embedding.shape[1], groups, eps, transform)
    else:
        raise TrainingError(f"unknown kind of head {kind!r}; choose timed, deep, conv, residual or dense")
    first = head.norm1 if isinstance(head, ResidualHead) else head.norm
    if norm is not None and norm.affine and first is not None:
        first.load_state_dict(norm.state_dict())
    return head


def _share_hidden_layers(head: Head, tasks: Mapping[str, HeadTask]) -> None:
    """Start with the hidden layers of the first head: heads that are fitted together share what they read."""
    first = next((task.module for task in tasks.values()), None)
    if isinstance(head, TimedHead) and isinstance(first, TimedHead) and head.hidden and first.hidden:
        head.hidden.load_state_dict(first.hidden.state_dict())
