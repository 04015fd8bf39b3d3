"""A backbone: any module that predicts from (x, time), whose features are read during the forward pass.

Noise prediction and heads share everything up to the input of a named output module (`conv_norm_out` of diffusers'
UNet2DModel). A hook reads this input. So one forward pass serves them all, and no forward pass is rewritten. The time
embedding is read in the same way, for the heads that need it. So is the activation after a tapped normalisation, for
heads that would compute the same.

A backbone may be in half precision, and stays so. Its outputs to heads and variances are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from optcov.identity import digest_tensors
from optcov.networks.activation import Activation
from optcov.networks.calls import call, check_widths, condition_names
from optcov.networks.taps import Tap, tap_of


@final
@dataclass(frozen=True)
class BackboneOutput:
    """The result of one forward pass."""

    output: Tensor  # the module's own output, (B, C or 2C, *D)
    features: Tensor  # input of the tapped module, (B, F, *D); of tokens, on their grid: (B, F, h, w)
    time_embedding: Tensor | None  # (B, E)
    activation: Activation | None = None  # SiLU of the tapped module's output, if that is a group normalisation


@final
class Backbone(nn.Module):
    """A module, and the names of what to read in it.

    module: takes (x, time argument (B,), **condition) and returns a tensor, or an object with `.sample` as diffusers
    does. The output has the shape of x, except for its channels. `optcov.networks.calls` knows the diffusers networks
    that are called differently (packed latents, other names). The time is float32, whatever the module's precision. x
    and floating-point conditions are cast to the dtype of its weights.
    tap: the name of the submodule whose input is the features, or a Tap. The module's output should depend on the
    features alone. None for a module without layers, which has no features and takes no heads.
    time_embedding: the name of the submodule whose output is the time embedding, or None.
    activation: the name of the SiLU after the tapped normalisation, whose output heads may share, or None.

    >>> import torch
    >>> from torch import nn
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.out = nn.Linear(3, 8), nn.Linear(8, 2)
    ...     def forward(self, x, time):
    ...         return self.out(torch.tanh(self.body(torch.cat([x, time[:, None]], 1))))
    >>> Backbone(Net(), tap="out")(torch.zeros(5, 2), torch.zeros(5)).features.shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        module: nn.Module,
        tap: str | Tap | None = "conv_norm_out",
        time_embedding: str | None = None,
        activation: str | None = None,
    ):
        super().__init__()
        self.module = module
        self.output_tap = tap if isinstance(tap, Tap) else None
        if isinstance(tap, Tap):
            time_embedding, activation = tap.time_embedding, tap.activation
        self.tap = tap.point if isinstance(tap, Tap) else tap
        self.time_embedding = time_embedding
        self.activation = activation
        for name in (self.tap, time_embedding, activation):
            if name is not None:
                _submodule(module, name)

    @property
    def layer(self) -> str | None:
        """The name of the tapped output layer; None if there is none."""
        return self.tap if self.output_tap is None else self.output_tap.layer

    @staticmethod
    def of(module: nn.Module, layer: str | None = None) -> Backbone:
        """Wrap a diffusers model, or any module with the name of its output layer; see `optcov.networks.taps`."""
        return Backbone(module, tap_of(module, layer))

    def forward(self, x: Tensor, time: Tensor, **condition: Tensor) -> BackboneOutput:
        """Run the module once: x (B, C, *D), time argument (B,), and the module's further inputs by name."""
        if condition:
            self._check_names(condition)
        elif isinstance(getattr(self.module, "class_embedding", None), nn.Module):
            raise ValueError(
                f"this {type(self.module).__name__} is conditional on a class, but no class is told; pass the "
                f'condition "class_labels", a tensor with a whole number per image'
            )
        weight, given = next(self.module.parameters(), x), x.dtype
        if x.dtype != weight.dtype and weight.is_floating_point():
            x = x.to(weight.dtype)  # data of another precision is what the network was trained on, too
            floats = {name: value.to(weight.dtype) for name, value in condition.items() if value.is_floating_point()}
            condition = {**condition, **floats}  # labels stay what they are
        seen = self.watched(partial(call, self.module, x, time, condition), x)
        return _lifted(seen) if given != x.dtype == torch.float64 else seen  # heads are of the data's precision

    def watched(self, run: Callable[[], Tensor], x: Tensor) -> BackboneOutput:
        """The output and features of a run of the module, which the caller's function starts.

        x: the data that the module sees, (B, C, *D).
        """
        with self._taps() as seen:
            raw = run()
        if len(raw) != len(x):
            raise ValueError(f"the network was given {len(x)} data points and returned {len(raw)}; they must agree")
        if self.tap is None:
            return BackboneOutput(raw, x.new_empty(len(x), 0), None)
        if "features" not in seen:
            raise ValueError(
                f"the module {self.tap!r} did not run in the forward pass, so its input could not be read; "
                f"tap a module that every forward pass uses"
            )
        features = seen["features"]
        if self.output_tap is not None:
            features = self.output_tap.features(features, x)
        known = BackboneOutput(raw, features, seen.get("time_embedding"), self._activation(seen))
        return _lifted(known) if raw.dtype.itemsize < 4 or features.dtype.itemsize < 4 else known

    def _check_names(self, condition: Mapping[str, Tensor]) -> None:
        """Refuse a condition that the module does not take."""
        if "class_labels" in condition and getattr(self.module, "class_embedding", self) is None:
            raise ValueError(
                f"this {type(self.module).__name__} knows no classes; leave the condition 'class_labels' out"
            )
        taken = condition_names(self.module)
        unknown = [] if taken is None else [name for name in condition if name not in taken]
        if unknown:
            raise ValueError(
                f"{type(self.module).__name__} takes no condition {unknown[0]!r}; it takes "
                f"{', '.join(taken or ()) or 'none'}"
            )
        check_widths(self.module, condition)

    @contextmanager
    def _taps(self) -> Iterator[dict[str, Tensor]]:
        """Hooks for one forward pass; none stays on the module, which may be somebody else's."""
        seen: dict[str, Tensor] = {}

        def read_features(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            seen["features"], seen["normalised"] = args[0], output

        def read_time(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
            seen["time_embedding"] = output

        def read_activation(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            # nothing came between the two, and the normalised values are still there
            if args[0] is seen.get("normalised") and output is not args[0]:
                seen["activation"] = output

        readers = {self.tap: read_features, self.time_embedding: read_time, self.activation: read_activation}
        handles = []
        for name, reader in readers.items():
            if name is not None:
                handles.append(self.module.get_submodule(name).register_forward_hook(reader))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _activation(self, seen: dict[str, Tensor]) -> Activation | None:
        """What heads may share, if the two modules are what heads begin with."""
        if "activation" not in seen or self.activation is None or self.tap is None:
            return None
        norm, silu = self.module.get_submodule(self.tap), self.module.get_submodule(self.activation)
        if not isinstance(norm, nn.GroupNorm) or not isinstance(silu, nn.SiLU):
            return None
        return Activation(norm, seen["normalised"], seen["activation"])


def _lifted(known: BackboneOutput) -> BackboneOutput:
    """What a backbone in another precision gives, as float32, in which heads and variances are computed."""
    time = None if known.time_embedding is None else known.time_embedding.float()
    return BackboneOutput(known.output.float(), known.features.float(), time)


def fingerprint(module: nn.Module) -> str:
    """SHA-256 of a module's weights by name, as float32, in hexadecimal. Heads store the fingerprint of their backbone.

    Weights that are stored in half precision and read back as float32 keep their fingerprint, because this is exact.
    """
    weights = module.state_dict().items()
    return digest_tensors({name: w.float() if w.is_floating_point() else w for name, w in weights})


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        raise ValueError(
            f"{type(module).__name__} has no submodule {name!r} to tap; its own submodules are: {children}"
        ) from error
