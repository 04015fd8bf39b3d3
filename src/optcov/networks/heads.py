"""Heads: small modules that read a backbone's features and estimate a second moment of the noise (Eq. 17).

    conv       out(conv3x3(SiLU(norm(h))))
    residual   the same after a residual block that also sees the time embedding
    timed      the convolution of the noise level, relative to the level's mean target: the default of `optcov fit`
    dense      out(linear(SiLU(...SiLU(linear(SiLU(norm(h))))))) for features without pixels

with h the features and `out` the output transform: "exp" is positive by construction, as second moments are;
"linear" is the paper's, and that of the learned range. The last layer starts at zero: a fresh head returns out(0).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from optcov.networks.thin import ThinConv2d

TRANSFORMS = ("exp", "linear")

# exp() of anything beyond would only turn a far outlier into infinity; trained heads stay within (-15, 5)
LOG_BOUNDS = (-40.0, 40.0)


class Head(nn.Module, ABC):
    """Features, and what else the head asks for -> one number per pixel and channel."""

    kind: str
    needs_time: bool = False
    config: dict[str, Any]  # with "kind", rebuilds the head by `build_head`

    def __init__(self, transform: str):
        super().__init__()
        if transform not in TRANSFORMS:
            raise ValueError(f"unknown output transform {transform!r} of a head; choose one of {', '.join(TRANSFORMS)}")
        self.transform = transform

    @abstractmethod
    def inputs(self, features: Tensor, time_embedding: Tensor | None = None) -> Tensor:
        """What the last, linear layer sees: (B, C, *D), or (B, C) without pixels."""

    @property
    @abstractmethod
    def last(self) -> nn.Module:
        """The last, linear layer; it starts at zero."""

    def forward(
        self,
        features: Tensor,
        time_embedding: Tensor | None = None,
        log_snr: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Estimate per pixel, (B, out_channels, *D); log_snr (B,) and noise (B, *D) serve the heads that ask."""
        raw = self.mix(self.last(self.inputs(features, time_embedding)), log_snr)
        if self.transform == "linear":
            return raw
        return (self.log_base(log_snr, noise) + self.squash(raw)).clamp(*LOG_BOUNDS).exp()

    def mix(self, values: Tensor, log_snr: Tensor | None) -> Tensor:
        """The last layer's values to one per pixel and channel."""
        return values

    def log_base(self, log_snr: Tensor | None, noise: Tensor | None) -> Tensor | float:
        """What an exponential output is relative to, as a logarithm, broadcastable to (B, out_channels, *D)."""
        return 0.0

    def squash(self, raw: Tensor) -> Tensor:
        """Logarithm of an exponential output relative to its base."""
        return raw

    def squash_slope(self, raw: Tensor) -> Tensor:
        """Derivative of `squash`."""
        return torch.ones_like(raw)

    def _start_at_zero(self) -> None:
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)


@final
class ConvHead(Head):
    """Normalisation, SiLU, 3x3 convolution: the paper's head for most data sets."""

    kind = "conv"

    def __init__(
        self, in_channels: int, out_channels: int, groups: int = 32, eps: float = 1e-5, transform: str = "exp"
    ):
        super().__init__(transform)
        self.config = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "groups": groups,
            "eps": eps,
            "transform": transform,
        }
        self.norm = _group_norm(groups, in_channels, eps)
        self.conv = ThinConv2d(in_channels, out_channels)
        self._start_at_zero()

    @property
    def last(self) -> nn.Module:
        """The last, linear layer."""
        return self.conv

    def inputs(self, features: Tensor, time_embedding: Tensor | None = None) -> Tensor:
        """What the last layer sees."""
        return functional.silu(self.norm(features))


@final
class ResidualHead(Head):
    """A residual block with the time embedding, then normalisation, SiLU, 3x3 convolution.

    The block: x + conv2(SiLU(norm2(conv1(SiLU(norm1(x))) + linear(SiLU(time))))), times residual_scale; with
    scale_shift the time embedding multiplies and shifts the second normalisation instead. A number of
    hidden_channels other than in_channels adds a 1x1 shortcut.
    """

    kind = "residual"
    needs_time = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        time_channels: int,
        groups: int = 32,
        eps: float = 1e-5,
        transform: str = "exp",
        hidden_channels: int | None = None,
        scale_shift: bool = False,
        residual_scale: float = 1.0,
        dropout: float = 0.0,
    ):
        super().__init__(transform)
        hidden = in_channels if hidden_channels is None else hidden_channels
        self.config = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "time_channels": time_channels,
            "groups": groups,
            "eps": eps,
            "transform": transform,
            "hidden_channels": hidden,
            "scale_shift": scale_shift,
            "residual_scale": residual_scale,
            "dropout": dropout,
        }
        self.scale_shift, self.residual_scale = scale_shift, residual_scale
        self.norm1 = _group_norm(groups, in_channels, eps)
        self.conv1 = nn.Conv2d(in_channels, hidden, 3, padding=1)
        self.time = nn.Linear(time_channels, 2 * hidden if scale_shift else hidden)
        self.norm2 = _group_norm(groups, hidden, eps)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1)
        self.shortcut = nn.Identity() if hidden == in_channels else nn.Conv2d(in_channels, hidden, 1)
        self.norm = _group_norm(groups, hidden, eps)
        self.conv = ThinConv2d(hidden, out_channels)
        self._start_at_zero()

    @property
    def last(self) -> nn.Module:
        """The last, linear layer."""
        return self.conv

    def inputs(self, features: Tensor, time_embedding: Tensor | None = None) -> Tensor:
        """What the last layer sees."""
        if time_embedding is None:
            raise ValueError(
                "a residual head needs the backbone's time embedding, but none was tapped; "
                'name the module that computes it: Backbone(module, time_embedding="...")'
            )
        return functional.silu(self.norm(self._block(features, time_embedding)))

    def _block(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        time = self.time(functional.silu(time_embedding))[..., None, None]
        hidden = self.conv1(functional.silu(self.norm1(x)))
        if self.scale_shift:
            scale, shift = time.chunk(2, dim=1)
            hidden = self.norm2(hidden) * (1 + scale) + shift
        else:
            hidden = self.norm2(hidden + time)
        hidden = self.conv2(self.dropout(functional.silu(hidden)))
        result: Tensor = (self.shortcut(x) + hidden) * self.residual_scale
        return result


@final
class TimedHead(Head):
    """A convolution head whose weights change with the noise level, relative to the mean target of the level.

        log g = log base + c - softplus(c - raw),   raw = sum_k hat_k(level) conv_k(SiLU(norm(h))),   level = -log-SNR

    base: "scale" is m(level), the mean target of the level; "noise" is eps_hat^2 + m(level), for targets E[eps^2]. Both
    times a gain(level) that makes the mean of g that of the target. The estimate stays below `ceiling` times the
    base, exp(c): an exponential of linear features has far too heavy a tail else. Between its knots, everything that
    depends on the level is linear in it. Fitted by `optcov.training.closed_form`.
    """

    kind = "timed"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        groups: int = 32,
        eps: float = 1e-5,
        base: str = "scale",
        ceiling: float = 5.0,
        knots: Sequence[float] = (-6.0, 0.0, 6.0),
        scale_knots: int = 64,
    ):
        super().__init__("exp")
        if base not in ("scale", "noise"):
            raise ValueError(f'unknown base {base!r} of a head; choose "scale" or "noise"')
        if len(knots) < 2 or any(a >= b for a, b in pairwise(knots)) or scale_knots < 2 or ceiling <= 1:
            raise ValueError(
                f"a timed head needs two or more ascending knots and a ceiling above 1, got {knots} and {ceiling}"
            )
        self.config = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "groups": groups,
            "eps": eps,
            "base": base,
            "ceiling": ceiling,
            "knots": list(knots),
            "scale_knots": scale_knots,
        }
        self.base, self.log_ceiling = base, math.log(ceiling)
        self.knots = tuple(float(knot) for knot in knots)
        self.parts = len(knots)
        self.norm = _group_norm(groups, in_channels, eps)
        self.conv = ThinConv2d(in_channels, len(knots) * out_channels)
        self.scale_levels: Tensor
        self.log_scale: Tensor
        self.log_gain: Tensor
        self.register_buffer("scale_levels", torch.linspace(-14.0, 11.0, scale_knots))
        self.register_buffer("log_scale", torch.zeros(scale_knots))
        self.register_buffer("log_gain", torch.zeros(scale_knots))
        self._start_at_zero()

    @property
    def last(self) -> nn.Module:
        """The last, linear layer."""
        return self.conv

    def inputs(self, features: Tensor, time_embedding: Tensor | None = None) -> Tensor:
        """What the last layer sees."""
        return functional.silu(self.norm(features))

    def mix(self, values: Tensor, log_snr: Tensor | None) -> Tensor:
        """Weigh the parts of the convolution by the level's hat functions."""
        hats = self.hats(_required(log_snr, "log_snr")).to(values)
        return torch.einsum("bk,bkchw->bchw", hats, values.reshape(len(values), self.parts, -1, *values.shape[2:]))

    def hats(self, log_snr: Tensor) -> Tensor:
        """Weights of the knots, (B, parts), that sum to one."""
        return _hats(-log_snr, torch.tensor(self.knots, dtype=log_snr.dtype, device=log_snr.device))

    def log_base(self, log_snr: Tensor | None, noise: Tensor | None) -> Tensor | float:
        """Logarithm of gain times base."""
        level = -_required(log_snr, "log_snr").to(self.log_scale)
        log_scale, log_gain = (
            _interpolate(level, self.scale_levels, table) for table in (self.log_scale, self.log_gain)
        )
        if self.base == "scale":
            return (log_scale + log_gain)[:, None, None, None]
        scale = log_scale.exp()[:, None, None, None]
        return (_required(noise, "noise").square() + scale).log() + log_gain[:, None, None, None]

    def squash(self, raw: Tensor) -> Tensor:
        """Bounded above by the ceiling."""
        return self.log_ceiling - functional.softplus(self.log_ceiling - raw)

    def squash_slope(self, raw: Tensor) -> Tensor:
        """Derivative of `squash`."""
        return torch.sigmoid(self.log_ceiling - raw)


@final
class DenseHead(Head):
    """A multilayer perceptron over features without pixels, (B, F) -> (B, out_channels)."""

    kind = "dense"

    def __init__(self, in_channels: int, out_channels: int, hidden: tuple[int, ...] = (), transform: str = "exp"):
        super().__init__(transform)
        self.config = {
            "in_channels": in_channels,
            "out_channels": out_channels,
            "hidden": list(hidden),
            "transform": transform,
        }
        widths = [in_channels, *hidden]
        self.norm = nn.LayerNorm(in_channels)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.linear = nn.Linear(widths[-1], out_channels)
        self._start_at_zero()

    @property
    def last(self) -> nn.Module:
        """The last, linear layer."""
        return self.linear

    def inputs(self, features: Tensor, time_embedding: Tensor | None = None) -> Tensor:
        """What the last layer sees."""
        hidden = functional.silu(self.norm(features))
        for layer in self.layers:
            hidden = functional.silu(layer(hidden))
        return hidden


HEADS: dict[str, type[Head]] = {"conv": ConvHead, "residual": ResidualHead, "dense": DenseHead, "timed": TimedHead}


def build_head(config: Mapping[str, Any]) -> Head:
    """Build a head from what `head_config` returned; the weights come separately."""
    options = dict(config)
    kind = options.pop("kind", None)
    if kind not in HEADS:
        raise ValueError(f"unknown kind of head {kind!r}; choose one of {', '.join(HEADS)}")
    try:
        return HEADS[kind](**options)
    except TypeError as error:
        raise ValueError(f"the options {options} do not fit a head of kind {kind!r}: {error}") from error


def head_config(head: Head) -> dict[str, Any]:
    """Everything that `build_head` needs, as plain JSON values."""
    return {"kind": head.kind, **head.config}


def _group_norm(groups: int, channels: int, eps: float) -> nn.GroupNorm:
    if channels % groups:
        raise ValueError(
            f"{channels} feature channels cannot be normalised in {groups} groups; "
            f"choose a number of groups that divides the channels"
        )
    return nn.GroupNorm(groups, channels, eps=eps)


def _hats(x: Tensor, knots: Tensor) -> Tensor:
    """Hat functions at x (B,), (B, K): linear interpolation between ascending knots, constant beyond them."""
    x = x.clamp(float(knots[0]), float(knots[-1]))
    right = torch.searchsorted(knots, x).clamp(1, len(knots) - 1)
    share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    hats = torch.zeros(len(x), len(knots), dtype=x.dtype, device=x.device)
    return hats.scatter(1, (right - 1)[:, None], (1 - share)[:, None]).scatter(1, right[:, None], share[:, None])


def _interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    return _hats(x, knots) @ values


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"a timed head needs {name}; call it as HeadedNetwork does, or call the network")
    return value
