from __future__ import annotations

import torch

from optcov.noise import batch_noise, image_generator, image_seed


def test_noise_of_an_image_does_not_depend_on_its_batch():
    whole = batch_noise(7, range(5), 3, (1, 28, 28))
    assert whole.shape == (5, 1, 28, 28)
    assert torch.equal(whole[2:4], batch_noise(7, [2, 3], 3, (1, 28, 28)))
    assert torch.equal(whole[4], torch.randn(1, 28, 28, generator=image_generator(7, 4, 3)))


def test_seed_image_and_stream_each_change_the_noise():
    base = batch_noise(0, [0], 0, (16,))
    for seed, image, stream in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(base, batch_noise(seed, [image], stream, (16,)))


def test_noise_is_standard_normal_and_independent_across_images_and_streams():
    """Mean, variance and correlations within 5 standard errors (level 1e-6 each), fixed seed."""
    drawn = torch.stack([batch_noise(0, range(100), stream, (100,), torch.float64) for stream in range(2)])
    n = drawn.numel()
    assert abs(float(drawn.mean())) < 5 / n**0.5
    assert abs(float(drawn.var() - 1)) < 5 * (2 / n) ** 0.5
    assert abs(float((drawn[0] * drawn[1]).mean())) < 5 / drawn[0].numel() ** 0.5
    assert abs(float((drawn[:, :-1] * drawn[:, 1:]).mean())) < 5 / drawn[:, 1:].numel() ** 0.5


def test_no_two_images_of_a_run_share_their_noise():
    """torch's CPU generator keeps 32 bits of a seed, so a hash of 300,000 images would collide ten times."""
    seeds = {image_seed(0, image, stream=0) for image in range(300_000)}
    assert len(seeds) == 300_000
    assert max(seeds) < 2**32


def test_neighbouring_images_streams_and_seeds_are_uncorrelated():
    """Largest of 3 x 400 correlations of 1,000 values within 5.5 standard errors (level 5e-5), fixed seed."""
    base = batch_noise(0, range(401), 0, (1000,), torch.float64)
    others = (base[1:], batch_noise(0, range(400), 1, (1000,), torch.float64), batch_noise(1, range(400), 0, (1000,)))
    for other in others:
        assert float((base[:400] * other).mean(1).abs().max()) < 5.5 / 1000**0.5
