"""The prediction of a network at x_t: clean data x0_hat, noise eps_hat, and the outputs of its heads.

With x_t = a x_0 + b eps (a^2 = alpha_bar, b^2 = beta_bar), every kind of output is linear in (x_0, eps). So x0_hat and
eps_hat are linear in (x_t, output). They are computed when asked for. Only "epsilon" divides by a; the others work
where no signal is left.

    kind             output                              x0_hat
    epsilon          eps                                 (x_t - b out) / a
    sample           x_0                                 out
    v_prediction     (a eps - b x_0) / sqrt(a^2 + b^2)   (a x_t - b sqrt(a^2 + b^2) out) / (a^2 + b^2)
    flow_prediction  eps - x_0                           (x_t - b out) / (a + b)

A head estimates the second moment of a quantity given x_t. The unit of the head names this quantity: "noise" is eps, as
in the paper; "velocity" is the output of v_prediction, which is of order 1 at every noise level. x_0 is linear in both.
So a factor turns a variance in either unit into a variance of x_0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, final

import torch
from torch import Tensor

from optcov.gaussian import per_sample, weighted_sum

PARAMETERISATIONS = ("epsilon", "sample", "v_prediction", "flow_prediction")
UNITS = ("noise", "velocity")

Network = Callable[..., "NoisePrediction | Prediction"]  # (x_t, t, **condition), t in the schedule's own times


class _Heads(dict[str, Tensor]):
    """Heads by name; the error of a missing one lists those there are."""

    def __missing__(self, name: str) -> Tensor:
        present = ", ".join(sorted(self)) or "none"
        raise ValueError(
            f"this covariance needs the head {name!r}, but the network returns only these heads: {present}; "
            f"fit the head first (optcov fit), or choose a covariance that needs no head"
        )


@final
@dataclass(frozen=True)
class NoisePrediction:
    """The return value of a plain function as network: the predicted noise in x_t, and heads in noise units.

    Known heads: "sn" estimates E[eps^2 | x_t], "npr" estimates E[(eps - eps_hat)^2 | x_t], and "range" is the v of
    Improved DDPM in [-1, 1]. Each has the shape of the noise. "sn_full" and "npr_full" are the matrix forms over
    flattened pixels, (B, d, d).
    """

    noise: Tensor  # eps_hat, (B, *D)
    heads: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.heads, Mapping):
            raise ValueError(
                f"heads is a {type(self.heads).__name__}; pass a dictionary of tensors by name, or leave it"
            )
        object.__setattr__(self, "heads", MappingProxyType(_Heads(self.heads)))
        for name, value in {"the noise": self.noise, **self.heads}.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} is a {type(value).__name__}, not a torch tensor; return tensors like x_t")
        shape = self.noise.shape
        for name, value in self.heads.items():
            pixels = math.prod(shape[1:])
            wanted = (shape[0], pixels, pixels) if name.endswith("_full") else tuple(shape)
            if tuple(value.shape) != wanted:
                raise ValueError(
                    f"head {name!r} has shape {tuple(value.shape)}, but with noise of shape {tuple(shape)} "
                    f"it must have {wanted}"
                )

    def head(self, name: str) -> Tensor:
        """The output of a head; the error lists the known heads."""
        return self.heads[name]


@final
@dataclass(frozen=True)
class Prediction:
    """A network's prediction at x_t. Its coefficients are float64, () or (B,)."""

    x_t: Tensor  # (B, *D)
    t: float | Tensor
    output: Tensor  # of the network, (B, *D)
    kind: str  # what the output means, see PARAMETERISATIONS
    signal: Tensor  # a = sqrt(alpha_bar)
    spread: Tensor  # b = sqrt(beta_bar)
    heads: Mapping[str, Tensor] = field(default_factory=_Heads)
    units: Mapping[str, str] = field(default_factory=dict)  # of the heads; "noise" unless told
    excesses: frozenset[str] = frozenset()  # heads that estimate a second moment less the squared prediction
    unguided: Tensor | None = None  # the output that the heads belong to, where guidance moved it, (B, *D)

    @staticmethod
    def of(answer: object, x_t: Tensor, t: float | Tensor, signal: Tensor, spread: Tensor) -> Prediction:
        """Make a prediction from what a network returned for x_t at t. Half precision becomes float32."""
        units: Mapping[str, str] = {}
        excesses: frozenset[str] = frozenset()
        unguided: Tensor | None = None
        if isinstance(answer, NoisePrediction):
            output, kind, heads = answer.noise, "epsilon", answer.heads
        elif isinstance(answer, Prediction):
            output, kind, heads = answer.output, answer.kind, answer.heads
            units, excesses, unguided = answer.units, answer.excesses, answer.unguided
        else:
            raise ValueError(
                f"the network returned a {type(answer).__name__}; a network returns NoisePrediction(noise, heads)"
            )
        if output.shape != x_t.shape:
            raise ValueError(
                f"the network returned noise of shape {tuple(output.shape)} for x_t of shape "
                f"{tuple(x_t.shape)}; they must agree (is this a network with a second output that belongs into heads?)"
            )
        if x_t.dtype.itemsize < 4:  # so that variances and means are never computed in half precision
            x_t = x_t.float()
        if output.dtype.itemsize < 4:
            output = output.float()
        lifted = _Heads(heads)
        for name, head in heads.items():
            if head.dtype.itemsize < 4:
                lifted[name] = head.float()
        return Prediction(x_t, t, output, kind, signal, spread, lifted, units, excesses, unguided)

    @property
    def of_heads(self) -> Prediction:
        """The prediction that the heads belong to: itself, except with guidance."""
        if self.unguided is None:
            return self
        output = self.unguided.float() if self.unguided.dtype.itemsize < 4 else self.unguided
        return replace(self, output=output, unguided=None)

    @cached_property
    def clean(self) -> Tensor:
        """x0_hat, (B, *D), not clipped."""
        if self.kind == "sample":
            return self.output
        if self.kind != "epsilon":
            of_x, of_output = _CLEAN[self.kind](self.signal, self.spread)
            return weighted_sum(of_x, self.x_t, of_output, self.output)
        if bool((self.signal == 0).any()):
            raise ValueError(
                f"at time {self.t} no signal is left, and predicted noise says nothing of x_0 there; use a network "
                f"that predicts x_0 or a velocity, or times below {self.t}"
            )
        return weighted_sum(1 / self.signal, self.x_t, -self.spread / self.signal, self.output)

    @cached_property
    def noise(self) -> Tensor:
        """eps_hat, (B, *D)."""
        if self.kind == "epsilon":
            return self.output
        of_x, of_output = _NOISE[self.kind](self.signal, self.spread)
        return weighted_sum(of_x, self.x_t, of_output, self.output)

    def combined(self, of_clean: Tensor, of_noise: Tensor) -> Tensor:
        """of_clean x0_hat + of_noise eps_hat, (B, *D), computed directly from the network's output."""
        if self.kind != "epsilon" or bool((self.signal == 0).any()):
            return weighted_sum(of_clean, self.clean, of_noise, self.noise)
        of_x = of_clean / self.signal
        return weighted_sum(of_x, self.x_t, of_noise - of_x * self.spread, self.output)

    def factor(self, unit: str) -> Tensor:
        """The factor from a variance in this unit to a variance of x_0, () or (B,): (d x_0 / d unit)^2 at fixed x_t."""
        if unit == "noise":
            return (self.spread / self.signal).square()
        power = self.signal.square() + self.spread.square()
        return self.spread.square() / power

    def in_unit(self, unit: str, clean: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """The quantity of a unit, (B, *D): as predicted, or from given clean data and noise."""
        noise = self.noise if noise is None else noise
        if unit == "noise":
            return noise
        return velocity(self.clean if clean is None else clean, noise, self.signal, self.spread)

    def head(self, name: str) -> Tensor:
        """The output of a head in its unit; the error lists the known heads."""
        return self.heads[name]

    def head_in_clean_units(self, head: str) -> Tensor:
        """A head's second moment, converted to one of x_0, (B, *D)."""
        value = self.heads[head]
        factor = self.factor(self.units.get(head, "noise"))
        return (per_sample(factor, value) if factor.ndim else factor) * value

    def with_heads(
        self, heads: Mapping[str, Tensor], units: Mapping[str, str] | None = None, excesses: Iterable[str] = ()
    ) -> Prediction:
        """The same prediction with heads, each in its unit.

        excesses: the heads that estimate the second moment minus the squared prediction.
        """
        return replace(self, heads=_Heads(heads), units=units or {}, excesses=frozenset(excesses))

    def bad_samples(self) -> Tensor:
        """Mark samples with NaN or infinity in the output or in any head: (B,) booleans."""
        # a float64 sum of float32 numbers is finite if and only if they all are; one pass instead of two
        total = self.output.flatten(1).sum(1, dtype=torch.float64)
        for head in self.heads.values():
            total = total + head.flatten(1).sum(1, dtype=torch.float64)
        return ~total.isfinite()

    def require_finite(self) -> Prediction:
        """Return the prediction, or raise a ValueError that names time and samples if it has NaN or infinity."""
        bad = self.bad_samples()
        if not bool(bad.any()):
            return self
        if not bool(self.x_t.isfinite().all()):
            raise ValueError(f"x_t holds NaN or infinity at time {self.t}, before any step was made")
        samples = bad.nonzero().flatten().tolist()
        raise ValueError(
            f"the network returned NaN or infinity at time {self.t} for samples {samples[:10]}"
            f"{' and others' if len(samples) > 10 else ''}; check its input scale, its weights and its precision"
        )

    def detach(self) -> Prediction:
        """The same prediction without gradient."""
        return replace(self, output=self.output.detach())

    def without_graph(self) -> Prediction:
        """The same prediction; x_t and the heads have no gradient either."""
        heads = _Heads({name: value.detach() for name, value in self.heads.items()})
        return replace(self, x_t=self.x_t.detach(), output=self.output.detach(), heads=heads)

    def double(self) -> Prediction:
        """The same prediction in float64, for likelihoods."""
        heads = _Heads({name: value.double() for name, value in self.heads.items()})
        return replace(self, x_t=self.x_t.double(), output=self.output.double(), heads=heads)


def velocity(clean: Tensor, noise: Tensor, signal: Tensor, spread: Tensor) -> Tensor:
    """(a eps - b x_0) / sqrt(a^2 + b^2), (B, *D): what v_prediction predicts."""
    norm = (signal.square() + spread.square()).sqrt()
    return weighted_sum(signal / norm, noise, -spread / norm, clean)


def output_of(kind: str, clean: Tensor, noise: Tensor, signal: Tensor, spread: Tensor) -> Tensor:
    """The output of a perfect network of this kind for clean data and noise, (B, *D)."""
    if kind == "epsilon":
        return noise
    if kind == "sample":
        return clean
    return noise - clean if kind == "flow_prediction" else velocity(clean, noise, signal, spread)


def check_condition(condition: Mapping[str, Tensor] | None, count: int) -> dict[str, Tensor]:
    """Return a condition as keyword arguments of a network, or raise a ValueError.

    Each is a tensor with one entry per image.
    """
    if condition is None:
        return {}
    if not isinstance(condition, Mapping) or not all(isinstance(name, str) for name in condition):
        raise ValueError(
            f"condition = {condition!r:.80} is not a dictionary of tensors by name; pass one such as "
            f'{{"class_labels": labels}}'
        )
    for name, value in condition.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != count:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"condition {name!r} is {found}; it must be a tensor with one entry for each of {count} images"
            )
    return dict(condition)


class Source(Protocol):
    """A source of clean data; `optcov.data.ImageSet` is one.

    A source may also have `condition(index) -> {name: tensor}`, the further inputs of a network for these data points;
    see `optcov.fitting.Conditioned`.
    """

    def __len__(self) -> int: ...

    def x_0(self, index: Tensor, /) -> Tensor:
        """Data points at the index, float32 (m, *D), scaled as the network sees them."""
        ...


def condition_of(source: object, index: Tensor) -> dict[str, Tensor]:
    """The condition of data points: the source's own `condition(index)`, or nothing."""
    offered = getattr(source, "condition", None)
    return check_condition(offered(index), len(index)) if callable(offered) else {}


def take(condition: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """The condition of some of the images."""
    return {name: value[index.to(value.device)] for name, value in condition.items()}


def check_kind(kind: str) -> str:
    """Return the name of a parameterisation, or raise a ValueError that lists the known ones."""
    if kind not in PARAMETERISATIONS:
        raise ValueError(f"unknown parameterisation {kind!r}; choose one of {', '.join(PARAMETERISATIONS)}")
    return kind


Weights = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # a, b -> weights of x_t and of the output


def _clean_of_velocity(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    power = a.square() + b.square()
    return a / power, -b / power.sqrt()


def _noise_of_velocity(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    power = a.square() + b.square()
    return b / power, a / power.sqrt()


_CLEAN: dict[str, Weights] = {
    "v_prediction": _clean_of_velocity,
    "flow_prediction": lambda a, b: (1 / (a + b), -b / (a + b)),
}
_NOISE: dict[str, Weights] = {
    "sample": lambda a, b: (1 / b, -a / b),
    "v_prediction": _noise_of_velocity,
    "flow_prediction": lambda a, b: (1 / (a + b), a / (a + b)),
}
