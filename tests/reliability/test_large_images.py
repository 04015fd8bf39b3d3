"""Correlated covariances of larger images: no matrix over all pixels is made, whatever is done with them."""

from __future__ import annotations

import torch

import optcov
from memory_bounds import memory_below
from small_bundles import small_unet

SHAPE = (3, 64, 64)  # 12,288 pixels: a matrix over them would take 604 MB in float32, and one per time far more
QUICK = {"images": 12, "times": 4, "measure_images": 3, "calibration_samples": 0, "heads": ["npr"]}


def test_a_fit_draws_and_scores_correlated_pixels_without_a_matrix_over_them():
    unet = small_unet(sample_size=64, in_channels=3, out_channels=3)
    images = torch.rand(16, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with memory_below(500):
        bundle = optcov.fit((unet, optcov.Schedule.linear()), images, progress=False, **QUICK)
        drawn = bundle.sample(2, method="CNPR-DDPM", steps=2, progress=False)
        score = bundle.bits_per_dim(images[:2], steps=[2, 3], methods=["CNPR-DDPM", "NPR-DDPM"], progress=False)
    assert drawn.shape == (2, *SHAPE)
    assert torch.isfinite(drawn).all()
    assert score.of("npr_correlated", 3).mean < score.of("npr", 3).mean + 1
