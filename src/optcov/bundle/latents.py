"""Images to latents and back, by the autoencoder of a pipeline.

A latent is the mode of what the encoder says, not a draw, so that the same image always gives the same one. It is
shifted and scaled as the pipeline's network knows it: (z - shift_factor) * scaling_factor.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from optcov.bundle.errors import BundleError


@final
class Codec:
    """The autoencoder of a pipeline, an AutoencoderKL or a VQModel of diffusers."""

    def __init__(self, module: nn.Module):
        config: Any = module.config
        self.module = module
        self.scale = float(config.get("scaling_factor") or 1.0)
        self.shift = float(config.get("shift_factor") or 0.0)
        self.channels = int(config["latent_channels"])
        self.colours = int(config["in_channels"])

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents (B, c, h, w), float32, of images in [-1, 1], (B, C, H, W)."""
        found = self.module.encode(self._cast(images))  # type: ignore[operator]
        values = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latents
        return (values.float() - self.shift) * self.scale  # type: ignore[no-any-return]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images in [-1, 1], float32 (B, C, H, W), of latents (B, c, h, w)."""
        if latents.ndim != 4 or latents.shape[1] != self.channels:
            raise BundleError(f"latents are (B, {self.channels}, h, w), not of shape {tuple(latents.shape)}")
        found = self.module.decode(self._cast(latents / self.scale + self.shift))  # type: ignore[operator]
        return found.sample.float().clamp(-1, 1)  # type: ignore[no-any-return]

    def _cast(self, values: Tensor) -> Tensor:
        weight = next(self.module.parameters())
        return values.to(weight.device, weight.dtype)
