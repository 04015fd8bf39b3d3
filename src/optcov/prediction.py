"""What a network returns: a prediction of the noise, and what its heads say about it.

A network is any callable (x_t, t) -> NoisePrediction. Networks that predict the clean image or the velocity are
converted here, at the border; everything inside speaks noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor

Network = Callable[[Tensor, "float | Tensor"], "NoisePrediction"]

PARAMETERISATIONS = ("epsilon", "sample", "v_prediction")


@final
@dataclass(frozen=True)
class NoisePrediction:
    """The noise a network predicts in x_t, with the outputs of its heads.

    Known heads: "sn" estimates E[eps^2 | x_t], "npr" estimates E[(eps - eps_hat)^2 | x_t], "range" is the v of
    Improved DDPM in [-1, 1]; each has the shape of the noise. "sn_full" and "npr_full" are their matrix forms over
    flattened pixels, (B, d, d).
    """

    noise: Tensor  # eps_hat, (B, *D)
    heads: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", MappingProxyType(dict(self.heads)))
        for name, value in self.heads.items():
            expected = self._shape_of(name)
            if value.shape != expected:
                raise ValueError(
                    f"head {name!r} has shape {tuple(value.shape)}, but with noise of shape {tuple(self.noise.shape)} "
                    f"it must have {tuple(expected)}"
                )

    def _shape_of(self, head: str) -> torch.Size:
        if head.endswith("_full"):
            pixels = math.prod(self.noise.shape[1:])
            return torch.Size((self.noise.shape[0], pixels, pixels))
        return self.noise.shape

    def head(self, name: str) -> Tensor:
        """Return the output of a head; the error lists the heads there are."""
        if name not in self.heads:
            present = ", ".join(sorted(self.heads)) or "none"
            raise ValueError(
                f"this covariance needs the head {name!r}, but the network returns only these heads: {present}; "
                f"fit the head first (optcov fit), or choose a covariance that needs no head"
            )
        return self.heads[name]

    def bad_samples(self) -> Tensor:
        """Mark samples with a NaN or infinity in the noise or in any head: (B,) booleans."""
        # a float64 sum of float32 numbers is finite if and only if they all are; one pass instead of two
        totals = [value.flatten(1).sum(1, dtype=torch.float64) for value in (self.noise, *self.heads.values())]
        return ~torch.stack(totals).isfinite().all(0)


def to_noise(output: Tensor, x_t: Tensor, alpha_bar: Tensor, beta_bar: Tensor, parameterisation: str) -> Tensor:
    """Convert a network's raw output to the noise it implies.

    alpha_bar and beta_bar broadcast to x_t. "sample" predicts x_0; "v_prediction" predicts
    sqrt(alpha_bar) eps - sqrt(beta_bar) x_0.
    """
    if parameterisation == "epsilon":
        return output
    if parameterisation == "sample":
        return (x_t - alpha_bar.sqrt() * output) / beta_bar.sqrt()
    if parameterisation == "v_prediction":
        return (alpha_bar.sqrt() * output + beta_bar.sqrt() * x_t) / (alpha_bar + beta_bar)
    raise ValueError(f"unknown parameterisation {parameterisation!r}; choose one of {', '.join(PARAMETERISATIONS)}")
