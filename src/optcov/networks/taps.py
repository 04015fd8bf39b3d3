"""Where to tap a network: its output layer, and how that layer makes pixels.

    UNet2DModel, UNet2DConditionModel   conv_norm_out -> conv_act -> conv_out, tapped before the normalisation
    DiTTransformer2DModel               proj_out_2, on tokens
    PixArtTransformer2DModel            proj_out, on tokens
    SD3Transformer2DModel               proj_out, on tokens
    FluxTransformer2DModel              proj_out, on tokens that are packed latents, 2 x 2 each
    any other module                    the Conv2d or Linear layer of a given name, tapped at its input

A Linear layer may see tokens (B, L, F) in the order of the image's rows, a grid (B, h, w, F) or vectors (B, F).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor, nn

from optcov.networks.form import VECTORS, Form

FLUX_PACKING = 2  # the pipeline packs 2 x 2 latents into a token, outside of the network
_MOST_NAMES = 12  # of layers that an error lists


@final
@dataclass(frozen=True)
class Tap:
    """The output layer of a network, and how its input becomes pixels."""

    layer: str  # name of the output layer
    point: str  # name of the module whose input is the features: the layer, or the normalisation before it
    tokens: bool  # whether the layer is linear; else it is a convolution
    kernel: int = 1  # side of a convolution's kernel
    patch: int | None = None  # side in pixels of what one position becomes; None: found from the image's size
    order: str = "pqc"  # of the channels of a position, see optcov.networks.form
    time_embedding: str | None = None  # name of the module that computes it
    activation: str | None = None  # name of the SiLU between point and layer

    @property
    def normalised(self) -> bool:
        """Whether a group normalisation and SiLU lie between the features and the layer."""
        return self.point != self.layer

    def features(self, seen: Tensor, x: Tensor) -> Tensor:
        """What the layer saw for data x, as (B, F, h, w), or (B, F) for data that are vectors; a view, no copy."""
        if not self.tokens or x.ndim == 2:
            return seen
        if seen.ndim == 4:
            return seen.permute(0, 3, 1, 2)
        if seen.ndim == 2:
            seen = seen[:, None, :]
        if x.ndim != 4 or seen.ndim != 3:
            raise ValueError(
                f"the layer {self.layer!r} sees {tuple(seen.shape)} for data of shape {tuple(x.shape)}; heads on a "
                f"linear layer need tokens (B, L, F) of images (B, C, H, W), or vectors"
            )
        height, width = x.shape[2:]
        side = self.patch or math.isqrt(height * width // seen.shape[1])  # 0: there are more tokens than pixels
        if not side or (height // side) * (width // side) != seen.shape[1] or height % side or width % side:
            patches = "square patches" if not side else f"patches of {side}x{side}"
            raise ValueError(
                f"the layer {self.layer!r} sees {seen.shape[1]} tokens, but {patches} do not cut images of "
                f"{height}x{width} into as many; name a layer that sees the tokens of the image alone"
            )
        return seen.transpose(1, 2).reshape(len(seen), -1, height // side, width // side)

    def form(self, features: Tensor, x: Tensor) -> Form:
        """The form of a head on features (B, F, h, w) for images x (B, C, H, W), or (B, F) for vectors (B, C)."""
        if x.ndim == 2:
            return Form(1, 1, VECTORS)
        (height, width), (rows, columns) = x.shape[2:], features.shape[2:]
        side = height // rows
        if (side * rows, side * columns) != (height, width) or self.patch not in (None, side):
            raise ValueError(
                f"features of {rows}x{columns} before {self.layer!r} do not become images of {height}x{width} by "
                f"square patches; name the layer that makes the network's own output"
            )
        return Form(self.kernel, side, self.order if side > 1 else "pqc")


def tap_of(module: nn.Module, layer: str | None = None) -> Tap:
    """Find the output layer of a diffusers model, or take the layer of a name in any module.

    layer: name of a Conv2d or Linear submodule that makes the module's output; needed for modules of your own.
    """
    if layer is not None:
        return _of_layer(module, layer)
    names = {base.__name__ for base in type(module).__mro__}
    if "DiTTransformer2DModel" in names:
        return _on_tokens(module, "proj_out_2", _patch(module))
    if names & {"PixArtTransformer2DModel", "SD3Transformer2DModel"}:
        return _on_tokens(module, "proj_out", _patch(module))
    if "FluxTransformer2DModel" in names:
        return _on_tokens(module, "proj_out", FLUX_PACKING * _patch(module), "cpq")
    if isinstance(getattr(module, "conv_out", None), nn.Conv2d) and hasattr(module, "conv_norm_out"):
        return _of_unet(module)
    raise ValueError(
        f"the output layer of a {type(module).__name__} is not known; name it, as layer=...: {_candidates(module)}"
    )


def _of_unet(unet: nn.Module) -> Tap:
    """conv_out with the group normalisation and SiLU before it, if it has these."""
    time = "time_embedding" if hasattr(unet, "time_embedding") else None
    norm, act, conv = (getattr(unet, name, None) for name in ("conv_norm_out", "conv_act", "conv_out"))
    plain = _of_layer(unet, "conv_out")
    # networks without a module for it apply SiLU as a function
    if not isinstance(norm, nn.GroupNorm) or not (act is None or isinstance(act, nn.SiLU)):
        return replace(plain, time_embedding=time)
    assert isinstance(conv, nn.Conv2d)
    activation = None if act is None else "conv_act"
    return replace(plain, point="conv_norm_out", time_embedding=time, activation=activation)


def _on_tokens(module: nn.Module, layer: str, patch: int, order: str = "pqc") -> Tap:
    return replace(_of_layer(module, layer), patch=patch, order=order)


def _of_layer(module: nn.Module, name: str) -> Tap:
    try:
        found = module.get_submodule(name)
    except AttributeError as error:
        raise ValueError(
            f"{type(module).__name__} has no output layer {name!r}; choose one of its layers: {_candidates(module)}"
        ) from error
    if isinstance(found, nn.Linear):
        return Tap(name, name, tokens=True)
    if not isinstance(found, nn.Conv2d):
        raise ValueError(
            f"{name!r} of {type(module).__name__} is a {type(found).__name__}, but heads sit on a Conv2d or a Linear; "
            f"choose one of these: {_candidates(module)}"
        )
    side = found.kernel_size[0]
    plain = found.kernel_size == (side, side) and side % 2 == 1 and found.groups == 1
    same = found.padding in ((side // 2, side // 2), "same") and found.padding_mode == "zeros"
    if not plain or not same or found.stride != (1, 1) or found.dilation != (1, 1):
        raise ValueError(
            f"the convolution {name!r} is {found}; heads have the form of a square, odd kernel with stride 1 and zeros "
            f"around the image, so choose another layer: {_candidates(module)}"
        )
    return Tap(name, name, tokens=False, kernel=side, order="cpq")


def _patch(module: nn.Module) -> int:
    config: Any = getattr(module, "config", None)
    return int(config.patch_size)


def _candidates(module: nn.Module) -> str:
    """The convolutions and linear layers there are, the last ones first."""
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Conv2d | nn.Linear) and name]
    listed = ", ".join(reversed(names[-_MOST_NAMES:])) or "it has no Conv2d and no Linear"
    return listed + (f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else "")
