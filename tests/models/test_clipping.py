"""How x0_hat is clipped: as the paper does, or in the last step only."""

from __future__ import annotations

import pytest
import torch

from optcov import METHODS, Schedule, sample
from optcov.bundle import Sampler
from small_bundles import small_bundle


def stepped(process, bundle, method):
    return sample(process, bundle.trajectory(4), (2, 1, 8, 8), noise_cap=bundle.noise_cap(method))


@pytest.mark.parametrize("method", ["DDIM", "NPR-DDIM", "NPR-DDPM"])
def test_a_bundle_draws_by_its_reverse_process_in_both_ways(method):
    bundle = small_bundle(Schedule.linear())
    ways = {clip: bundle.reverse_process(method, clip_mean=clip) for clip in (True, False)}
    plain = METHODS[method].reverse_process(bundle.network, bundle.schedule)
    torch.testing.assert_close(stepped(ways[True], bundle, method), stepped(plain, bundle, method))
    for clip, process in ways.items():
        images = bundle.sample(2, method=method, steps=4, progress=False, clip_mean=clip)
        torch.testing.assert_close(images, stepped(process, bundle, method), rtol=0, atol=1e-4)
        assert float(images.abs().max()) <= 1
    assert not torch.allclose(*(stepped(process, bundle, method) for process in ways.values()), atol=1e-3)


def test_the_papers_way_is_the_default_everywhere():
    bundle = small_bundle(Schedule.linear())
    assert bundle.reverse_process("NPR-DDIM").keeps_raw_noise
    assert Sampler(bundle, "NPR-DDIM", 4).process.keeps_raw_noise
    again = Sampler(bundle, "NPR-DDIM", 4, use_clipped_model_output=True)
    assert again.process.use_clipped_model_output
    assert not again.process.keeps_raw_noise


def test_settings_tell_the_two_ways_apart_and_the_papers_are_as_before():
    bundle = small_bundle(Schedule.linear())
    paper, told, other = (Sampler(bundle, "NPR-DDIM", 4, clip_mean=clip).settings() for clip in (None, True, False))
    assert "clip_mean" not in paper
    assert told == paper
    assert other == {**paper, "clip_mean": False}


def test_attach_takes_either_way():
    from diffusers import DDPMPipeline, DDPMScheduler

    from optcov import attach
    from small_bundles import small_unet

    bundle = small_bundle(Schedule.linear())
    for clip in (True, False):
        pipeline = attach(DDPMPipeline(small_unet(), DDPMScheduler()), bundle, "NPR-DDIM", clip_mean=clip)
        assert pipeline.scheduler.config.clip_mean is clip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_mean": 3}, "clip_mean = 3 is not a switch"),
        ({"method": "UniPC", "clip_mean": True}, "UniPC has no covariance: leave ocm_probes, clip_mean"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(small_bundle(Schedule.linear()), **{"method": "NPR-DDIM", "steps": 4, **options})


def test_images_that_were_kept_in_one_way_are_not_given_as_those_of_the_other(tmp_path):
    bundle = small_bundle(Schedule.linear())
    options = {"method": "NPR-DDIM", "steps": 3, "progress": False, "work": tmp_path}
    first = bundle.sample(2, **options)
    assert torch.equal(bundle.sample(2, clip_mean=True, **options), first)  # said or not, it is the same
    for told, said in (({"clip_mean": False}, "clip mean"), ({"use_clipped_model_output": True}, "use clipped model")):
        with pytest.raises(ValueError, match=f"the {said}.* changed from none to {next(iter(told.values()))}"):
            bundle.sample(2, **told, **options)


@pytest.mark.parametrize("method", ["Euler-Maruyama", "Probability flow", "DDIM", "UniPC"])
def test_a_whole_number_of_steps_may_be_a_float(method):
    bundle = small_bundle()
    options = {"method": method, "progress": False}
    assert torch.equal(bundle.sample(1, steps=3.0, **options), bundle.sample(1, steps=3, **options))
    with pytest.raises(ValueError, match=r"steps = 2\.5 is not a positive whole number"):
        Sampler(bundle, method, 2.5)


def test_a_trajectory_that_is_passed_tells_the_number_of_steps():
    bundle = small_bundle(Schedule.linear())
    sampler = Sampler(bundle, "NPR-DDIM", 10, trajectory=bundle.trajectory(4))
    assert (sampler.title, sampler.settings()["steps"]) == ("NPR-DDIM, 4 steps", 4)
