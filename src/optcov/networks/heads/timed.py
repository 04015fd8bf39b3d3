"""The timed head: a convolution with weights by noise level, relative to the mean target of the level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from optcov.networks.form import VECTORS
from optcov.networks.heads.base import ConvolutionalHead, HiddenLayers, optional_norm


@final
class TimedHead(ConvolutionalHead):
    """A convolution head whose weights change with the noise level, relative to the mean target of the level.

        log g = log base + c - softplus(c - raw),   raw = sum_k hat_k(level) conv_k(SiLU(norm(h))),   level = -log-SNR

    base: "scale" is m(level), the mean target of the level. "noise" is eps_hat^2 + m(level), for targets E[eps^2]. Both
    are multiplied by gain(level), so that the mean of g equals the mean target. The estimate stays below `ceiling`
    times the base, where c = log(ceiling). Without this bound, an exponential of linear features has far too heavy a
    tail. Everything that depends on the level is linear between its knots. `optcov.fitting.closed_form` fits the head.

    hidden: channels of two hidden layers before the convolution, or 0 for none. They see more of the image around a
    pixel, and products of features.
    groups: None leaves normalisation and SiLU out.
    kernel, patch, order: the form of the convolution, for example a linear layer on tokens; see optcov.networks.form.
    """

    kind = "timed"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        groups: int | None = 32,
        eps: float = 1e-5,
        base: str = "scale",
        ceiling: float = 5.0,
        knots: Sequence[float] = (-6.0, 0.0, 6.0),
        scale_knots: int = 64,
        kernel: int = 3,
        patch: int = 1,
        order: str = "pqc",
        hidden: int = 0,
    ):
        super().__init__("exp", locals())
        if type(hidden) is not int or hidden < 0:
            raise ValueError(f"hidden = {hidden!r} channels of a head must be a whole number, 0 for no hidden layers")
        if not hidden:
            del self.config["hidden"]  # as before there were any
        if base not in ("scale", "noise"):
            raise ValueError(f'unknown base {base!r} of a head; choose "scale" or "noise"')
        if len(knots) < 2 or any(a >= b for a, b in pairwise(knots)) or scale_knots < 2 or ceiling <= 1:
            raise ValueError(
                f"a timed head needs two or more ascending knots and a ceiling above 1, got {knots} and {ceiling}"
            )
        self.base, self.log_ceiling, self.needs_prediction = base, math.log(ceiling), base == "noise"
        self.knots = tuple(float(knot) for knot in knots)
        self.parts = len(knots)
        self.norm = optional_norm(groups, in_channels, eps)
        self.hidden = HiddenLayers(in_channels, hidden, self.form.kernel) if hidden else None
        self.conv = self._last_layer(hidden or in_channels, len(knots) * out_channels)
        self.scale_levels: Tensor
        self.log_scale: Tensor
        self.log_gain: Tensor
        self.register_buffer("scale_levels", torch.linspace(-14.0, 11.0, scale_knots))
        self.register_buffer("log_scale", torch.zeros(scale_knots))
        self.register_buffer("log_gain", torch.zeros(scale_knots))
        self._start_at_zero()

    def mix(self, values: Tensor, log_snr: Tensor | None) -> Tensor:
        """Sum the parts of the convolution, weighted by the level's hat functions."""
        hats = self.hats(_required(log_snr, "log_snr")).to(values)
        parts = values.reshape(len(values), self.parts, -1, *values.shape[2:])
        return self.form.pixels(torch.einsum("bk,bkchw->bchw", hats, parts))

    def hats(self, log_snr: Tensor) -> Tensor:
        """Weights of the knots, (B, parts). They sum to one."""
        return _hats(-log_snr, torch.tensor(self.knots, dtype=log_snr.dtype, device=log_snr.device))

    def log_base(self, log_snr: Tensor | None, predicted: Tensor | None = None) -> Tensor | float:
        """Logarithm of gain times base."""
        hats = _hats(-_required(log_snr, "log_snr").to(self.log_scale), self.scale_levels)
        log_scale, log_gain = hats @ self.log_scale, hats @ self.log_gain
        axes = (-1, 1) if self.form.order == VECTORS else (-1, 1, 1, 1)
        if self.base == "scale":
            return (log_scale + log_gain).reshape(axes)
        scale = log_scale.exp().reshape(axes)
        return (_required(predicted, "the prediction").square() + scale).log() + log_gain.reshape(axes)

    def squash(self, raw: Tensor) -> Tensor:
        """c - softplus(c - raw): bounded above by the logarithm of the ceiling."""
        return self.log_ceiling - functional.softplus(self.log_ceiling - raw)

    def squash_slope(self, raw: Tensor) -> Tensor:
        return torch.sigmoid(self.log_ceiling - raw)


def _hats(x: Tensor, knots: Tensor) -> Tensor:
    """Hat functions at x (B,), (B, K): linear interpolation between ascending knots, constant beyond them."""
    x = x.clamp(knots[0], knots[-1])  # tensors: reading them would make a GPU wait
    right = torch.searchsorted(knots, x).clamp(1, len(knots) - 1)
    share = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    hats = torch.zeros(len(x), len(knots), dtype=x.dtype, device=x.device)
    return hats.scatter(1, (right - 1)[:, None], (1 - share)[:, None]).scatter(1, right[:, None], share[:, None])


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"a timed head needs {name}; call it as HeadedNetwork does, or call the network")
    return value
