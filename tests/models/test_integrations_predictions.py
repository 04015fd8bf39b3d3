"""Heads that read the predicted noise, inside diffusers, on networks that predict something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler

from optcov import Schedule, sample
from optcov.bundle import Bundle
from optcov.integrations.diffusers import UNetWithHead, attach
from optcov.networks import Backbone, HeadedNetwork, TimeArgument, TimedHead
from small_bundles import small_unet

N, SHAPE = 50, (2, 1, 8, 8)


def bundle_with_timed_head(parameterisation: str) -> Bundle:
    head = TimedHead(8, 1, groups=4, base="noise").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.conv.weight.copy_(0.1 * torch.randn(head.conv.weight.shape, generator=generator))
    network = HeadedNetwork(
        Backbone.of(small_unet()), Schedule.linear(N), {"sn": head}, TimeArgument(1.0, 1.0), parameterisation
    )
    return Bundle(network.eval().requires_grad_(False), SHAPE[1:])


@pytest.mark.parametrize("parameterisation", ["epsilon", "sample", "v_prediction"])
def test_an_attached_pipeline_draws_what_the_bundle_does(parameterisation: str, tmp_path: Path) -> None:
    bundle = bundle_with_timed_head(parameterisation)
    pipeline = attach(DDPMPipeline(small_unet(seed=9), DDPMScheduler(N)), bundle, "SN-DDPM")
    pipeline.save_pretrained(tmp_path)
    loaded = DDPMPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.unet, UNetWithHead)
    generator = torch.Generator().manual_seed(1)
    x_0 = sample(
        bundle.reverse_process("SN-DDPM"),
        bundle.trajectory(6),
        start=torch.randn(SHAPE, generator=generator),
        noise=lambda t, s: torch.randn(SHAPE, generator=generator),
        noise_cap=bundle.noise_cap("SN-DDPM"),
    )
    for drawn in (pipeline, loaded):
        drawn.set_progress_bar_config(disable=True)
        images = drawn(
            batch_size=2, num_inference_steps=6, output_type="pt", generator=torch.Generator().manual_seed(1)
        ).images
        assert (images - (x_0 / 2 + 0.5).clamp(0, 1)).abs().max() <= 1e-5
