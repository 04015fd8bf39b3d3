"""diffusers' UNet2DModel, with config for the few things that the paper's networks need and it cannot say.

The forward pass is UNet2DModel's own. Submodules that it has built are adjusted from the registered config, so that
`save_pretrained` and `from_pretrained` keep all of it. By default nothing is adjusted. With `patch_size` above 1 it
sees each p x p patch of pixels as one position with p^2 times the channels, which costs a fraction of the time.
"""

from __future__ import annotations

from typing import Any, final

from diffusers import UNet2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d import UNet2DOutput
from diffusers.models.unets.unet_2d_blocks import AttnUpBlock2D
from torch import Tensor, nn
from torch.nn import functional


@final
class PaperUNet(UNet2DModel):  # type: ignore[misc]
    """A UNet2DModel that can also be improved-diffusion's, DDPM's or score_sde's network.

    attention_heads: number of heads of every attention (UNet2DModel fixes the width of a head instead).
    residual_scale: every residual sum is divided by it; sqrt(2) in score_sde.
    resample_shortcut: residual blocks that change the resolution have a 1x1 convolution beside them.
    single_up_attention: an ascending level has one attention, after its last block, not one after each.
    channels_per_group: a norm over C channels has min(C // channels_per_group, norm_num_groups) groups.
    patch_size: side of the square of pixels that is one position; channels are ordered as by torch's pixel_shuffle.
    time_shift, time_scale: `forward` takes the network's own time argument; callers make it of the
        schedule's time t by (t - time_shift) * time_scale. UNet2DModel's is t - 1, hence the defaults.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        sample_size: int | None = None,
        in_channels: int = 3,
        out_channels: int = 3,
        center_input_sample: bool = False,
        time_embedding_type: str = "positional",
        time_embedding_dim: int | None = None,
        freq_shift: int = 0,
        flip_sin_to_cos: bool = True,
        down_block_types: tuple[str, ...] = ("DownBlock2D", "AttnDownBlock2D"),
        mid_block_type: str | None = "UNetMidBlock2D",
        up_block_types: tuple[str, ...] = ("AttnUpBlock2D", "UpBlock2D"),
        block_out_channels: tuple[int, ...] = (128, 256),
        layers_per_block: int = 2,
        mid_block_scale_factor: float = 1,
        downsample_padding: int = 1,
        downsample_type: str = "conv",
        upsample_type: str = "conv",
        dropout: float = 0.0,
        act_fn: str = "silu",
        attention_head_dim: int | None = None,
        norm_num_groups: int = 32,
        attn_norm_num_groups: int | None = None,
        norm_eps: float = 1e-5,
        resnet_time_scale_shift: str = "default",
        add_attention: bool = True,
        class_embed_type: str | None = None,
        num_class_embeds: int | None = None,
        num_train_timesteps: int | None = None,
        attention_heads: int | None = None,
        residual_scale: float = 1.0,
        resample_shortcut: bool = False,
        single_up_attention: bool = False,
        channels_per_group: int | None = None,
        patch_size: int = 1,
        time_shift: float = 1.0,
        time_scale: float = 1.0,
    ):
        arguments: dict[str, Any] = {
            name: value for name, value in locals().items() if name not in ("self", "__class__", *_OWN_SETTINGS)
        }
        if channels_per_group is not None:  # the groups are set below; 1 lets a narrow level be built at all
            arguments |= {"norm_num_groups": 1, "attn_norm_num_groups": 1}
        if patch_size < 1:
            raise ValueError(f"patch_size = {patch_size} of a U-Net must be at least 1")
        arguments |= {"in_channels": in_channels * patch_size**2, "out_channels": out_channels * patch_size**2}
        super().__init__(**arguments)
        self.register_to_config(
            norm_num_groups=norm_num_groups,
            attn_norm_num_groups=attn_norm_num_groups,
            in_channels=in_channels,
            out_channels=out_channels,
        )
        if single_up_attention:
            _keep_last_attention(self.up_blocks)
        for name, module in self.named_modules():
            if isinstance(module, Attention):
                module.rescale_output_factor = residual_scale
                _set_heads(module, name, attention_heads)
            elif isinstance(module, ResnetBlock2D):
                module.output_scale_factor = residual_scale
                if resample_shortcut and (module.up or module.down):
                    module.conv_shortcut = nn.Conv2d(module.in_channels, module.out_channels, kernel_size=1)
            elif isinstance(module, nn.GroupNorm) and channels_per_group is not None:
                module.num_groups = _groups(name, module.num_channels, channels_per_group, norm_num_groups)

    def forward(
        self, sample: Tensor, timestep: Any, class_labels: Tensor | None = None, return_dict: bool = True
    ) -> Any:
        """Predict at images (B, C, H, W), as UNet2DModel does."""
        side = self.config.patch_size
        seen = functional.pixel_unshuffle(sample, side) if side > 1 else sample
        raw = super().forward(seen, timestep, class_labels, return_dict=False)[0]
        pixels = functional.pixel_shuffle(raw, side) if side > 1 else raw
        return UNet2DOutput(sample=pixels) if return_dict else (pixels,)


_OWN_SETTINGS = (
    "attention_heads",
    "residual_scale",
    "resample_shortcut",
    "single_up_attention",
    "channels_per_group",
    "patch_size",
    "time_shift",
    "time_scale",
)


def _groups(name: str, channels: int, per_group: int, largest: int) -> int:
    groups = min(channels // per_group, largest)
    if groups < 1 or channels % groups:
        raise ValueError(f"the {channels} channels of {name} cannot be normalised in {groups} groups")
    return groups


def _keep_last_attention(up_blocks: nn.ModuleList) -> None:
    for block in up_blocks:
        if isinstance(block, AttnUpBlock2D):
            for i in range(len(block.attentions) - 1):
                block.attentions[i] = nn.Identity()


def _set_heads(attention: Any, name: str, heads: int | None) -> None:
    if heads is None:
        return
    if attention.inner_dim % heads:
        raise ValueError(f"{heads} attention heads do not divide the {attention.inner_dim} channels of {name}")
    attention.heads = attention.sliceable_head_dim = heads
    attention.scale = (attention.inner_dim // heads) ** -0.5
