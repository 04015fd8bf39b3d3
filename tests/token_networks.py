"""Tiny, randomly initialised networks of each class that heads can sit on, called as (x, time, **condition)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from optcov.networks import Backbone
from optcov.networks.taps import tap_of


class Named(nn.Module):
    """A diffusers transformer, called by the names of its arguments."""

    def __init__(self, network: nn.Module, **told: Tensor):
        super().__init__()
        self.network, self.told = network, told

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        weight = next(self.network.parameters())
        told = {name: value.expand(len(x), *value.shape[1:]).to(weight.dtype) for name, value in self.told.items()}
        return self.call(x, time, told)

    def call(self, x: Tensor, time: Tensor, told: dict[str, Tensor]) -> Tensor:
        return self.network(x, timestep=time, **told).sample


class PixArt(Named):
    def call(self, x, time, told):
        added = {"resolution": None, "aspect_ratio": None}
        return self.network(x, timestep=time, added_cond_kwargs=added, **told).sample


class Flux(Named):
    """Packs latents as the pipeline does, and unpacks the output as it does."""

    def call(self, x, time, told):
        count, channels, height, width = x.shape
        packed = x.reshape(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        packed = packed.reshape(count, height * width // 4, 4 * channels)
        rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
        ids = torch.stack([torch.zeros_like(rows), rows, columns], 2).reshape(-1, 3).float()
        texts = torch.zeros(told["encoder_hidden_states"].shape[1], 3)
        output = self.network(packed, timestep=time / 1000, img_ids=ids, txt_ids=texts, **told).sample
        output = output.reshape(count, height // 2, width // 2, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return output.reshape(count, -1, height, width)


def dit(out_channels: int = 2) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = DiTTransformer2DModel(
                num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=out_channels, num_layers=1,
                sample_size=8, patch_size=2, num_embeds_ada_norm=3,
            )  # fmt: skip

        def forward(self, x, time):
            return self.network(x, time, class_labels=torch.arange(len(x)) % 4)

    return Labelled()


def pixart(out_channels: int = 2) -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    network = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, out_channels=out_channels, num_layers=1,
        sample_size=8, patch_size=2, cross_attention_dim=8, caption_channels=6, use_additional_conditions=False,
    )  # fmt: skip
    return PixArt(network, encoder_hidden_states=torch.randn(1, 3, 6))


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    network = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=2, out_channels=2, num_layers=1, attention_head_dim=4,
        num_attention_heads=2, joint_attention_dim=6, caption_projection_dim=8, pooled_projection_dim=5,
        pos_embed_max_size=16,
    )  # fmt: skip
    return Named(network, encoder_hidden_states=torch.randn(1, 3, 6), pooled_projections=torch.randn(1, 5))


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    network = FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, pooled_projection_dim=5, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return Flux(network, encoder_hidden_states=torch.randn(1, 3, 6), pooled_projections=torch.randn(1, 5))


def unet(out_channels: int = 2) -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, in_channels=2, out_channels=out_channels, block_out_channels=(8, 8), layers_per_block=1,
        norm_num_groups=4, attention_head_dim=8, down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def conditional_unet(**options) -> nn.Module:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(
        sample_size=8, in_channels=2, out_channels=2, block_out_channels=(8, 8), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, cross_attention_dim=6, **{"norm_num_groups": 4, **options},
    )  # fmt: skip
    return Named(network, encoder_hidden_states=torch.randn(1, 3, 6))


NETWORKS = {
    "unet": unet,
    "unet with sigma": lambda: unet(4),
    "conditional unet": conditional_unet,
    "conditional unet, kernel 5": lambda: conditional_unet(conv_out_kernel=5),
    "conditional unet, another activation": lambda: conditional_unet(act_fn="gelu"),
    "dit": dit,
    "dit with sigma": lambda: dit(4),
    "pixart": pixart,
    "pixart with sigma": lambda: pixart(4),
    "sd3": sd3,
    "flux": flux,
}
SQUARE_ONLY = ("dit", "dit with sigma")  # diffusers puts its tokens on a square grid


def make(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = NETWORKS[name]().eval().requires_grad_(False)
        for weight in module.parameters():
            if weight.ndim < 2 or not bool(weight.any()):  # what diffusers starts at zero or one
                weight.add_(0.1 * torch.randn_like(weight))
    return module


def tapped(module: nn.Module) -> Backbone:
    """A backbone of what `make` gives, tapped in the network that the module holds, if it holds one."""
    inner = getattr(module, "network", None)
    if inner is None:
        return Backbone.of(module)
    tap = tap_of(inner)
    paths = {name: getattr(tap, name) for name in ("layer", "point", "time_embedding", "activation")}
    return Backbone(module, replace(tap, **{name: path and f"network.{path}" for name, path in paths.items()}))
