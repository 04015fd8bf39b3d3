"""Heads in closed form: the linear last layer of each head on frozen features, by streaming sums.

Let X be the last layer's inputs, w its weights and y the target. X has a row per pixel: the 3x3 patch and a 1. On
tokens, X has a row per token, and y has a column for each pixel and channel of its patch.

    gamma   minimise sum (y / g + log g).  With log g = offset + slope * X w this is a Gamma regression with a log
            link. Its Fisher information sum slope^2 X^T X is constant in w:
                w <- w + (sum slope^2 X^T X)^-1 sum slope X^T (y / g - 1)
            A head that bounds its output has a slope between 0 and 1 there. Then the constant matrix is an upper
            bound on the information. This makes the steps shorter, and leaves the minimum where it is.
    mse     minimise sum weight_t (y - X w)^2:  w = (sum weight_t X^T X)^-1 sum weight_t X^T y

The first pass over the data gathers the matrix. It also finds a start, by regressing log y on X: if y / g is chi-square
with one degree of freedom, log y is log g plus noise of mean -(log 2 + Euler's constant). Where this start is worse
than w = 0, as for the learned range, the start is w = 0. A timed head has separate weights for each hat function; X
then stands for hat_k X. Sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from optcov.covariances import Regression
from optcov.fitting.config import TrainingError
from optcov.fitting.rows import Rows
from optcov.gaussian import per_sample
from optcov.networks.heads import Head, TimedHead
from optcov.networks.thin import thin_convolution, thin_weight_gradient

LOG_CHI_SQUARE_MEAN = -1.2703628454614782  # E[log z^2] for standard normal z: -(log 2 + Euler's constant)
SMALLEST_TARGET = 1e-12  # log of an exact zero would be minus infinity; only the start uses it
CHUNK_BYTES = 2**28  # of X and X^T X by sample at a time
TOLERANCE = 2e-5  # of the mean deviance, in nats: a fit stops where a full step would gain less
RIDGE = 1e-8  # of the unit diagonal: dead or equal features must not stop the solve


Stream = Callable[[], Iterable[Rows]]  # the same rows at every call
Reduce = Callable[[Tensor], Tensor]  # sum over processes


@final
@dataclass(frozen=True)
class FitReport:
    """The course of a closed-form fit."""

    losses: tuple[float, ...]  # lowest so far of the mean over pixels of y / g + log g, or the squared error, by pass
    converged: bool


def fit_gamma(
    stream: Stream,
    heads: Mapping[str, Head],
    passes: int = 25,
    reduce: Reduce = lambda total: total,
) -> dict[str, FitReport]:
    """Fit the last layers by Fisher scoring, all from the same rows, and store the weights.

    A head has converged when a full step is predicted to lower its mean deviance by less than TOLERANCE, in nats.
    """
    scorings = {name: _Scoring(start) for name, start in _first_pass(stream, heads, reduce).items()}
    for _ in range(passes):
        weights = {name: scoring.candidate for name, scoring in scorings.items()}
        for name, sums in _score_pass(stream, heads, weights, reduce).items():
            scorings[name].update(*sums)
        if all(scoring.finished for scoring in scorings.values()):
            break
    for name, scoring in scorings.items():
        store(heads[name], scoring.weights)
    return {name: FitReport(tuple(scoring.history), scoring.converged) for name, scoring in scorings.items()}


def fit_least_squares(
    stream: Stream,
    heads: Mapping[str, Head],
    weights: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    reduce: Reduce = lambda total: total,
) -> dict[str, FitReport]:
    """Fit the last layers of heads with linear output by the normal equations, and store the weights.

    weights: by head, a function of times (B,) -> (B,), such as 1 / m_t^2. Without it, all times count equally.
    """
    totals: dict[str, list[Tensor]] = {}
    for rows in stream():
        patches = layer_rows(next(iter(heads.values())).last, rows).double()
        for name, head in heads.items():
            factor = weights[name](rows.times) if weights else torch.ones(len(rows.times), dtype=torch.float64)
            y = _as_rows(head.to_channels(rows.regressions[name].target)).double()
            x = factor.to(y.device)[:, None, None] * patches
            parts = [
                torch.einsum("bnp,bnq->pq", x, patches),
                torch.einsum("bnp,bnc->pc", x, y),
                (x[..., -1:] * y.square()).sum(),
                x[..., -1].sum() * y.shape[-1],
            ]
            totals[name] = [a + b for a, b in zip(totals[name], parts, strict=True)] if name in totals else parts
    _require_rows(totals)
    reports = {}
    for name, head in heads.items():
        gram, moment, square, count = (reduce(total) for total in totals[name])
        solution = Solver(gram)(moment)
        store(head, solution)
        # |y - X w|^2 = |y|^2 - w^T (2 X^T y - X^T X w)
        error = (square - (solution * (2 * moment - gram @ solution)).sum()) / count
        reports[name] = FitReport((float(error),), True)
    return reports


def log_estimate(head: Head, rows: Rows, regression: Regression, raw: Tensor) -> Tensor:
    """log g from the head's raw values, (B, C, *D)."""
    relative = head.log_base(rows.log_snr) + head.squash(raw)
    return regression.log_estimate(relative)


def layer_rows(layer: nn.Module, rows: Rows) -> Tensor:
    """Rows X of a linear layer by sample: (B, h w, k k F + 1) for a convolution, (B, 1, F + 1) for a dense layer."""
    inputs = rows.inputs
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
        patches = inputs.flatten(2).transpose(1, 2)
    elif isinstance(layer, nn.Conv2d):
        patches = functional.unfold(inputs, layer.kernel_size, padding=layer.kernel_size[0] // 2 - rows.edge)
        patches = patches.transpose(1, 2)
    else:
        patches = inputs[:, None, :]
    return torch.cat([patches, patches.new_ones(*patches.shape[:2], 1)], dim=2)


def hats(head: Head, log_snr: Tensor) -> Tensor:
    """Weights of a head's parts by sample, (B, K); K = 1 but for timed heads."""
    return head.hats(log_snr) if isinstance(head, TimedHead) else torch.ones(len(log_snr), 1, device=log_snr.device)


def apply(head: Head, rows: Rows, weights: Tensor) -> Tensor:
    """X w shaped as pixels, (B, C, *D), for weights (K P, p^2 C)."""
    parts = hats(head, rows.log_snr)
    shaped = weights.to(rows.inputs).reshape(parts.shape[1], -1, weights.shape[1])  # (K, P, C)
    kernel = shaped[:, :-1].transpose(1, 2).flatten(0, 1)  # (K C, P - 1)
    bias = shaped[:, -1].flatten()
    if isinstance(head.last, nn.Conv2d):
        whole = thin_convolution(rows.inputs, kernel.reshape(len(bias), -1, *head.last.kernel_size), bias)
        values = rows.inner(whole)
    else:
        values = functional.linear(rows.inputs, kernel, bias)
    shaped_values = values.reshape(len(values), parts.shape[1], -1, *values.shape[2:])
    return head.to_pixels(torch.einsum("bk,bk...->b...", parts, shaped_values))


def transposed_product(head: Head, rows: Rows, residual: Tensor) -> Tensor:
    """X^T r without building X: (K P, p^2 C) from r (B, C, *D). It is computed as a convolution's weight gradient."""
    parts, residual = hats(head, rows.log_snr), head.to_channels(residual)
    spread = torch.einsum("bk,b...->bk...", parts, residual).flatten(1, 2)  # (B, K C, *D)
    if isinstance(head.last, nn.Conv2d):
        weight = thin_weight_gradient(rows.inputs, rows.outer(spread), head.last.kernel_size[0])
        product = torch.cat([weight.flatten(1), spread.sum((0, 2, 3), dtype=torch.float64)[:, None]], dim=1)  # (K C, P)
    else:
        product = torch.cat([spread.T @ rows.inputs, spread.sum(0)[:, None]], dim=1)
    return product.double().reshape(parts.shape[1], residual.shape[1], -1).transpose(1, 2).flatten(0, 1)


def store(head: Head, weights: Tensor) -> None:
    """Put weights (K P, C) into a head's last layer."""
    layer = head.last
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    assert layer.bias is not None
    parts = head.parts if isinstance(head, TimedHead) else 1
    shaped = weights.reshape(parts, -1, weights.shape[1])
    with torch.no_grad():
        layer.weight.copy_(shaped[:, :-1].transpose(1, 2).flatten(0, 1).reshape(layer.weight.shape))
        layer.bias.copy_(shaped[:, -1].flatten())


@final
@dataclass(frozen=True)
class _Start:
    """What the first pass gives a head."""

    solve: Solver  # with its Fisher information, (K P, K P)
    weights: Tensor  # of the regression of log y, (K P, C)
    fresh_loss: float  # mean deviance with weights 0


def _first_pass(stream: Stream, heads: Mapping[str, Head], reduce: Reduce) -> dict[str, _Start]:
    grams: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    for rows in stream():
        fresh = {
            name: log_estimate(head, rows, rows.regressions[name], torch.zeros_like(rows.regressions[name].target))
            for name, head in heads.items()
        }
        _add_grams(grams, heads, rows, fresh)
        for name, head in heads.items():
            regression = rows.regressions[name]
            moment = transposed_product(head, rows, _start_residual(regression, fresh[name]))
            for sums, value in ((moments, moment), (losses, _deviance(regression, fresh[name]))):
                sums[name] = sums[name] + value if name in sums else value
    _require_rows(grams)
    starts = {}
    for name in heads:
        solve = Solver(reduce(grams[name]))
        total, count = reduce(losses[name]).tolist()
        starts[name] = _Start(solve, solve(reduce(moments[name])), total / count)
    return starts


def _add_grams(grams: dict[str, Tensor], heads: Mapping[str, Head], rows: Rows, fresh: Mapping[str, Tensor]) -> None:
    """Add sum slope^2 X^T W X of a batch to the matrices (K P, K P) by head, a few samples at a time."""
    layer = next(iter(heads.values())).last
    positions, width = layer_rows(layer, replace(rows, inputs=rows.inputs[:1])).shape[1:]
    chunk = max(1, CHUNK_BYTES // (8 * width**2 + 4 * positions * width))
    for first in range(0, len(rows.times), chunk):
        some = slice(first, first + chunk)
        patches = layer_rows(layer, replace(rows, inputs=rows.inputs[some]))
        squares = (patches.mT @ patches).double()  # (b, P, P): one product serves every head and every knot
        for name, head in heads.items():
            regression, parts = rows.regressions[name], hats(head, rows.log_snr).double()
            weight = (regression.weight * regression.slope.square()).to(parts.device)
            pairs = torch.einsum("b,bk,bl->klb", weight[some], parts[some], parts[some])
            weighted = squares
            if (information := regression.information(fresh[name])) is not None:  # over channels their mean
                shares = _as_rows(head.to_channels(information))[some].mean(2, keepdim=True)
                weighted = (patches.mT @ (shares * patches)).double()
            knots = parts.shape[1]
            if name not in grams:
                grams[name] = squares.new_zeros(knots * width, knots * width)
            blocks = grams[name].view(knots, width, knots, width)
            for k, other in product(range(knots), range(knots)):
                blocks[k, :, other] += torch.tensordot(pairs[k, other], weighted, 1)


def _start_residual(regression: Regression, fresh: Tensor) -> Tensor:
    """Weighted slope times what X w should be for log g to be log y on average, by the log g of a fresh head.

    Targets that may be negative have no logarithm: they start from one step of scoring.
    """
    if regression.spread is not None:
        return per_sample(regression.weight * regression.slope, fresh) * regression.score(fresh)
    log_y = regression.target.clamp(min=SMALLEST_TARGET).log() - LOG_CHI_SQUARE_MEAN
    return per_sample(regression.weight * regression.slope, log_y) * (log_y - fresh)


def _deviance(regression: Regression, log_g: Tensor) -> Tensor:
    """Weighted sum of y / g + log g, and the number of terms, float64 (2,) on the CPU."""
    weight = per_sample(regression.weight, log_g)
    total = (weight * regression.deviance(log_g)).sum(dtype=torch.float64).cpu()
    return torch.stack([total, regression.weight.sum().cpu() * log_g[0].numel()])


def _score_pass(
    stream: Stream, heads: Mapping[str, Head], weights: Mapping[str, Tensor], reduce: Reduce
) -> dict[str, tuple[float, Tensor, float]]:
    """Mean deviance, X^T(slope (y / g - 1)) at the weights, and the number of terms, by head, in one pass."""
    gradients = {name: torch.zeros_like(w) for name, w in weights.items()}
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in weights}
    for rows in stream():
        for name, head in heads.items():
            regression = rows.regressions[name]
            raw = apply(head, rows, weights[name])
            log_g = log_estimate(head, rows, regression, raw)
            weight = per_sample(regression.weight, raw)
            slope = per_sample(regression.slope, raw) * head.squash_slope(raw)
            gradients[name] += transposed_product(head, rows, weight * slope * regression.score(log_g)).cpu()
            sums[name] += _deviance(regression, log_g)
    result = {}
    for name, gradient in gradients.items():
        total, count = reduce(sums[name]).tolist()
        result[name] = (total / count, reduce(gradient), count)
    return result


@final
class Solver:
    """Solves with a Gram matrix, scaled to a unit diagonal. A small ridge matters for dead or equal features only."""

    def __init__(self, gram: Tensor):
        gram = gram.cpu()
        diagonal = gram.diagonal()
        if not bool(gram.isfinite().all()):
            raise TrainingError("the features hold NaN or infinity, so no head can be fitted; check the backbone")
        self.scale = (diagonal + 1e-12 * diagonal.mean().clamp(min=1e-300)).rsqrt()
        scaled = self.scale[:, None] * gram * self.scale
        ridge = RIDGE
        while True:
            self.factor, info = torch.linalg.cholesky_ex(scaled + ridge * torch.eye(len(gram), dtype=gram.dtype))
            if not int(info):
                return
            ridge *= 10  # rounding has made a nearly singular matrix indefinite

    def __call__(self, right: Tensor) -> Tensor:
        """gram^-1 right, for right (P, C)."""
        return self.scale[:, None] * torch.cholesky_solve(self.scale[:, None] * right.cpu(), self.factor)


@final
class _Scoring:
    """Damped Fisher scoring of one head.

    The full step is right where the model is: y / g near 1. Where g is far too low the deviance is steeper than the
    information says, so the damping starts low, grows with every success and halves with every failure.
    """

    def __init__(self, start: _Start):
        if not math.isfinite(start.fresh_loss):
            raise TrainingError("the loss of a fresh head is not finite; check the backbone's predictions and the data")
        self.weights = self.candidate = start.weights
        self.solve = start.solve
        self.step = torch.zeros_like(start.weights)
        self.damping = 0.25
        self.history: list[float] = []
        self.lowest = start.fresh_loss
        self.converged = self.finished = False

    def update(self, deviance: float, gradient: Tensor, count: float) -> None:
        """Take note of the mean deviance and the gradient at the candidate, and choose the next one."""
        if self.finished:
            return
        if deviance <= self.lowest or not bool(self.candidate.any()):  # false for NaN, as an overshooting step gives
            self.damping = min(1.0, 1.5 * self.damping) if self.history else self.damping
            self.weights, self.lowest = self.candidate, deviance
            self.step = self.solve(gradient)
            self.converged = self.finished = float((gradient * self.step).sum()) / (2 * count) < TOLERANCE
        elif not self.history:
            self.weights = torch.zeros_like(self.weights)  # the regression of log y is worse than a fresh head
        else:
            self.damping /= 2
            self.finished = self.damping < 1e-4  # no step however short helps
        self.history.append(self.lowest)
        self.candidate = self.weights + self.damping * self.step


def _as_rows(x: Tensor) -> Tensor:
    """(B, C, *D) -> (B, H W, C)."""
    return x.flatten(2).transpose(1, 2) if x.ndim > 2 else x[:, None, :]


def _require_rows(totals: Mapping[str, object]) -> None:
    if not totals:
        raise TrainingError("there are no images to fit heads on")
