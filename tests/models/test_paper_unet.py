"""PaperUNet: UNet2DModel's own forward pass, adjusted from the registered config alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from diffusers import UNet2DModel
from diffusers.utils import logging as diffusers_logging
from torch.nn import functional

import optcov
from close_outputs import assert_close_outputs
from optcov.networks import fingerprint
from optcov.networks.paper_unet import PaperUNet
from optcov.networks.unet import build_unet

SMALL = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
SCORE_SDE = {
    "sample_size": 8,
    "block_out_channels": (16, 24),
    "layers_per_block": 1,
    "down_block_types": ("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "downsample_type": "resnet",
    "upsample_type": "resnet",
    "residual_scale": math.sqrt(2),
    "resample_shortcut": True,
    "single_up_attention": True,
    "channels_per_group": 4,
}


def run(unet: torch.nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)
    with torch.no_grad():
        return unet.eval()(x, torch.tensor([3.0, 700.5])).sample


def test_by_default_it_is_a_unet2dmodel():
    torch.manual_seed(0)
    ours = PaperUNet(**SMALL)
    theirs = UNet2DModel(**SMALL, attention_head_dim=None)
    theirs.load_state_dict(ours.state_dict())
    assert_close_outputs(run(ours), run(theirs))


@pytest.mark.parametrize(
    "config",
    [
        SCORE_SDE,
        SMALL | {"attention_heads": 4, "time_shift": 0.0, "time_scale": 0.25},
        SMALL | {"patch_size": 2},
    ],
)
def test_saving_and_loading_by_diffusers_keeps_everything(tmp_path, config, capfd):
    diffusers_logging.set_verbosity_warning()
    torch.manual_seed(0)
    unet = PaperUNet(**config)
    unet.save_pretrained(tmp_path)
    loaded = PaperUNet.from_pretrained(tmp_path)
    assert_close_outputs(run(loaded), run(unet))
    assert fingerprint(loaded) == fingerprint(unet)
    assert json.loads(loaded.to_json_string()) | {"_name_or_path": ""} == json.loads(unet.to_json_string()) | {
        "_name_or_path": ""
    }
    assert "not expected" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"residual_scale": 1.0},
        {"channels_per_group": 8},
        {"attention_heads": 2},
    ],
)
def test_each_setting_that_has_no_weights_matters(change):
    torch.manual_seed(0)
    unet = PaperUNet(**SCORE_SDE)
    other = PaperUNet(**(SCORE_SDE | change))
    other.load_state_dict(unet.state_dict())
    assert not torch.allclose(run(unet), run(other), atol=1e-5)


def test_settings_with_weights_add_or_remove_them():
    names = set(PaperUNet(**SCORE_SDE).state_dict())
    assert "down_blocks.0.downsamplers.0.conv_shortcut.weight" in names
    assert "up_blocks.0.upsamplers.0.conv_shortcut.weight" in names
    assert "up_blocks.0.attentions.1.to_q.weight" in names
    assert "up_blocks.0.attentions.0.to_q.weight" not in names


@pytest.mark.parametrize("channels", [(2, 24), (16, 46)])
def test_groups_must_divide_the_channels(channels):
    with pytest.raises(ValueError, match=r"channels of .* cannot be normalised in"):
        PaperUNet(**(SCORE_SDE | {"block_out_channels": channels}))


def test_the_heads_of_an_attention_share_its_channels():
    unet = PaperUNet(**SMALL, attention_heads=4)
    attention = unet.mid_block.attentions[0]
    assert (attention.heads, attention.scale) == (4, 16**-0.5)
    with pytest.raises(ValueError, match="5 attention heads do not divide the 64 channels of down_blocks"):
        PaperUNet(**SMALL, attention_heads=5)


def test_on_patches_it_is_a_unet2dmodel_between_two_shuffles_of_the_pixels():
    torch.manual_seed(0)
    ours = PaperUNet(**SMALL, patch_size=2)
    theirs = UNet2DModel(**SMALL, attention_head_dim=None, in_channels=12, out_channels=12)
    theirs.load_state_dict(ours.state_dict())
    x, time = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8), torch.tensor([3.0, 700.5])
    with torch.no_grad():
        inside = theirs.eval()(functional.pixel_unshuffle(x, 2), time).sample
    assert_close_outputs(run(ours), functional.pixel_shuffle(inside, 2))
    assert (ours.config.in_channels, ours.config.out_channels) == (3, 3)
    with pytest.raises(ValueError, match="patch_size = 0 of a U-Net must be at least 1"):
        PaperUNet(**SMALL, patch_size=0)


def test_a_network_on_patches_takes_heads_and_is_kept_in_a_bundle(tmp_path):
    unet = build_unet((3, 8, 8), (8, 16), groups=4, head_dim=8, patch_size=2)
    images = torch.rand(32, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    quick = {"images": 16, "measure_images": 2, "times": 3, "calibration_samples": 0, "progress": False}
    made = optcov.fit((unet, optcov.Schedule.vp_sde(), "v_prediction"), images, **quick)
    made.save(tmp_path / "bundle")
    drawn = made.sample(2, method="NPR-DDIM", steps=3, progress=False)
    assert_close_outputs(optcov.load(tmp_path / "bundle").sample(2, method="NPR-DDIM", steps=3, progress=False), drawn)
    assert made.posterior(drawn, 0.5).variance.shape == (2, 3, 8, 8)
    with pytest.raises(ValueError, match="8x8 cannot be cut into patches of 3x3; use a patch size that divides both"):
        build_unet((3, 8, 8), (8, 16), patch_size=3)
