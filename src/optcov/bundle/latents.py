"""Images to latents and back, by the autoencoder of a pipeline.

A latent is the mode of what the encoder says, not a draw, so that the same image always gives the same one. It is
shifted and scaled as the pipeline's network knows it: (z - shift_factor) * scaling_factor, or with a mean and a
deviation for each channel (SDXL) (z - latents_mean) * scaling_factor / latents_std.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from optcov.bundle.errors import BundleError
from optcov.identity import digest, known_by
from optcov.networks import fingerprint


@final
class Codec:
    """The autoencoder of a pipeline, an AutoencoderKL or a VQModel of diffusers."""

    def __init__(self, module: nn.Module):
        config: Any = module.config
        self.given = module
        self.channels = int(config["latent_channels"])
        self.colours = int(config["in_channels"])
        self.factor = 2 ** (len(config["block_out_channels"]) - 1)  # pixels of a latent's side
        scale, shift = float(config.get("scaling_factor") or 1.0), float(config.get("shift_factor") or 0.0)
        mean, std = config.get("latents_mean"), config.get("latents_std")
        by_channel = mean is not None and std is not None
        # what makes latents of what the encoder says, in plain numbers
        self.scaling: tuple[Any, Any] = ([scale / s for s in std], list(mean)) if by_channel else (scale, shift)

    @cached_property
    def module(self) -> Any:
        """The autoencoder in a precision that is enough: some overflow in float16, and say so."""
        config: Any = self.given.config
        half = next(self.given.parameters()).dtype == torch.float16
        return copy.deepcopy(self.given).float() if half and config.get("force_upcast") else self.given

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents (B, c, h, w), float32, of images in [-1, 1], (B, C, H, W)."""
        if images.ndim != 4 or images.shape[1] != self.colours or not images.is_floating_point():
            raise BundleError(
                f"images are (B, {self.colours}, H, W) in [-1, 1], not {images.dtype} of shape {tuple(images.shape)}; "
                f"scale 8-bit ones by images / 127.5 - 1"
            )
        found = self.module.encode(self._cast(images))
        values = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latents
        scale, shift = self._scaling(values)
        latents: Tensor = (values.float() - shift) * scale
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images in [-1, 1], float32 (B, C, H, W), of latents (B, c, h, w)."""
        if latents.ndim != 4 or latents.shape[1] != self.channels:
            raise BundleError(f"latents are (B, {self.channels}, h, w), not of shape {tuple(latents.shape)}")
        scale, shift = self._scaling(latents)
        found = self.module.decode(self._cast(latents / scale + shift))
        images: Tensor = found.sample.float().clamp(-1, 1)
        return images

    def identity(self) -> dict[str, str]:
        """What images of latents depend on besides, see optcov.identity."""
        return known_by(digest([fingerprint(self.given), *self.scaling]))

    def _scaling(self, latents: Tensor) -> list[Tensor]:
        return [torch.tensor(value, device=latents.device).reshape(1, -1, 1, 1) for value in self.scaling]

    def _cast(self, values: Tensor) -> Tensor:
        weight = next(self.module.parameters())
        return values.to(weight.device, weight.dtype)
