"""The interface of a head: features to one number per pixel and channel, with a linear last layer. And plain heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from optcov.networks.activation import Activation, activated
from optcov.networks.form import VECTORS, Form
from optcov.networks.thin import ThinConv2d

TRANSFORMS = ("exp", "linear")
FORM = ("kernel", "patch", "order")  # settings that are those of a Form

# exp() of anything beyond would only turn a far outlier into infinity; trained heads stay within (-15, 5)
LOG_BOUNDS = (-40.0, 40.0)


class Head(nn.Module, ABC):
    """A module from features, and other inputs it may need, to one number per pixel and channel."""

    kind: str
    form: Form
    unit: str = "noise"  # of what it estimates, see optcov.prediction
    about: str = "zero"  # "prediction": it estimates a second moment less the squared prediction
    needs_prediction: bool = False  # whether it asks for what the network predicts, in its unit
    config: dict[str, Any]  # with "kind", rebuilds the head by `build_head`

    def __init__(self, transform: str, settings: dict[str, Any]):
        # settings: the arguments of the constructor by name, which `config` remembers
        super().__init__()
        if transform not in TRANSFORMS:
            raise ValueError(f"unknown output transform {transform!r} of a head; choose one of {', '.join(TRANSFORMS)}")
        self.transform = transform
        self.form = Form(**{name: settings.pop(name) for name in FORM if name in settings})
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        self.config = {name: value for name, value in plain.items() if name not in ("self", "__class__")}
        self.config |= self.form.config()

    @abstractmethod
    def inputs(
        self,
        features: Tensor,
        time_embedding: Tensor | None = None,
        activation: Activation | None = None,
        hidden: bool = True,
    ) -> Tensor:
        """The input of the linear last layer: (B, C, *D), or (B, C) without pixels.

        activation: the features' activation as the backbone computed it. A head with the same normalisation need not
        compute it again.
        hidden: False returns the input of the hidden layers instead, if there are any; they train apart.
        """

    @property
    @abstractmethod
    def last(self) -> nn.Module:
        """The linear last layer, which starts at zero."""

    def forward(
        self,
        features: Tensor,
        time_embedding: Tensor | None = None,
        log_snr: Tensor | None = None,
        predicted: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """Estimate per pixel, (B, out_channels, *D). Some heads need log_snr (B,) and predicted (B, *D)."""
        if next(self.parameters()).dtype.itemsize < 4:  # weights that were read from a file in half precision
            self.float()
        raw = self.mix(self.last(self.inputs(features, time_embedding, activation)), log_snr)
        if self.transform == "linear":
            return raw
        return (self.log_base(log_snr, predicted) + self.squash(raw)).clamp(*LOG_BOUNDS).exp()

    def mix(self, values: Tensor, log_snr: Tensor | None) -> Tensor:
        """Turn the last layer's values into one value per pixel and channel."""
        return self.to_pixels(values)

    def to_pixels(self, channels: Tensor) -> Tensor:
        """Arrange the last layer's output at each position as the pixels of its patch."""
        return channels

    def to_channels(self, pixels: Tensor) -> Tensor:
        """The inverse of `to_pixels`: arrange images like the output of the last layer."""
        return pixels

    def log_base(self, log_snr: Tensor | None, predicted: Tensor | None = None) -> Tensor | float:
        """Logarithm of the base that an exponential output is relative to, broadcastable to (B, out_channels, *D)."""
        return 0.0

    def squash(self, raw: Tensor) -> Tensor:
        """Logarithm of an exponential output relative to its base."""
        return raw

    def squash_slope(self, raw: Tensor) -> Tensor:
        """Derivative of `squash`."""
        return torch.ones_like(raw)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Head:
        """Move the head as torch moves modules, but never to half precision: variances are computed in float32."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            halved = moved.is_floating_point() and moved.dtype.itemsize < 4 <= tensor.dtype.itemsize
            return tensor.to(moved.device) if halved else moved

        parent: Any = super()  # torch declares no types for it
        parent._apply(move, recurse)
        return self

    def _start_at_zero(self) -> None:
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)


@final
class HiddenLayers(nn.Module):
    """h + SiLU(conv2(h)) with h = SiLU(conv1(x)): (B, F, h, w) -> (B, channels, h, w)."""

    def __init__(self, in_channels: int, channels: int, kernel: int = 3):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.conv1(x))
        return hidden + functional.silu(self.conv2(hidden))


class ConvolutionalHead(Head):
    """A head that ends with normalisation, SiLU and a convolution to few channels. The kernel is 3x3 by default.

    Without a normalisation, the convolution reads the features themselves.
    """

    norm: nn.GroupNorm | None
    conv: ThinConv2d
    hidden: HiddenLayers | None  # between the features and the convolution

    def __init__(self, transform: str, settings: dict[str, Any]):
        super().__init__(transform, settings)
        self.hidden = None

    @property
    def last(self) -> nn.Module:
        return self.conv

    def inputs(
        self,
        features: Tensor,
        time_embedding: Tensor | None = None,
        activation: Activation | None = None,
        hidden: bool = True,
    ) -> Tensor:
        if self.form.order == VECTORS:
            features = features[:, :, None, None]
        seen = features if self.norm is None else activated(self.norm, features, activation)
        return seen if self.hidden is None or not hidden else self.hidden(seen)

    def to_pixels(self, channels: Tensor) -> Tensor:
        return self.form.pixels(channels)

    def to_channels(self, pixels: Tensor) -> Tensor:
        return self.form.channels(pixels)

    def _last_layer(self, in_channels: int, out_channels: int) -> ThinConv2d:
        return ThinConv2d(in_channels, out_channels * self.form.patch**2, self.form.kernel)


@final
class ConvHead(ConvolutionalHead):
    """Normalisation, SiLU, 3x3 convolution: the paper's head for most data sets.

    groups=None leaves normalisation and SiLU out. kernel, patch, order: see optcov.networks.form.
    """

    kind = "conv"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        groups: int | None = 32,
        eps: float = 1e-5,
        transform: str = "exp",
        kernel: int = 3,
        patch: int = 1,
        order: str = "pqc",
    ):
        super().__init__(transform, locals())
        self.norm = optional_norm(groups, in_channels, eps)
        self.conv = self._last_layer(in_channels, out_channels)
        self._start_at_zero()


@final
class DenseHead(Head):
    """A multilayer perceptron over features without pixels, (B, F) -> (B, out_channels)."""

    kind = "dense"

    def __init__(self, in_channels: int, out_channels: int, hidden: tuple[int, ...] = (), transform: str = "exp"):
        super().__init__(transform, locals())
        widths = [in_channels, *hidden]
        self.norm = nn.LayerNorm(in_channels)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.linear = nn.Linear(widths[-1], out_channels)
        self._start_at_zero()

    @property
    def last(self) -> nn.Module:
        return self.linear

    def inputs(
        self,
        features: Tensor,
        time_embedding: Tensor | None = None,
        activation: Activation | None = None,
        hidden: bool = True,
    ) -> Tensor:
        seen = functional.silu(self.norm(features))
        for layer in self.layers:
            seen = functional.silu(layer(seen))
        return seen


def optional_norm(groups: int | None, channels: int, eps: float) -> nn.GroupNorm | None:
    """The normalisation of feature channels; None without groups."""
    return None if groups is None else group_norm(groups, channels, eps)


def group_norm(groups: int, channels: int, eps: float) -> nn.GroupNorm:
    """The normalisation of feature channels; the error lists the possible numbers of groups."""
    if channels % groups:
        raise ValueError(
            f"{channels} feature channels cannot be normalised in {groups} groups; "
            f"choose a number of groups that divides the channels"
        )
    return nn.GroupNorm(groups, channels, eps=eps)
