"""How x0_hat is clipped: as measures best for images, or as the paper does."""

from __future__ import annotations

import pytest
import torch

from optcov import METHODS, Schedule, sample
from optcov.bundle import Sampler
from small_bundles import small_bundle

PAPER = {"clip_mean": True, "use_clipped_model_output": None}


def drawn(bundle, method, **options):
    return bundle.sample(2, method=method, steps=4, progress=False, **options)


def stepped(process, bundle, method):
    return sample(process, bundle.trajectory(4), (2, 1, 8, 8), noise_cap=bundle.noise_cap(method))


@pytest.mark.parametrize("method", ["DDIM", "NPR-DDIM", "NPR-DDPM"])
def test_a_bundle_draws_by_its_reverse_process_in_both_ways(method):
    bundle = small_bundle(Schedule.linear())
    ways = {exact: bundle.reverse_process(method, paper_exact=exact) for exact in (True, False)}
    plain = METHODS[method].reverse_process(bundle.network, bundle.schedule)
    torch.testing.assert_close(stepped(ways[True], bundle, method), stepped(plain, bundle, method))
    for exact, process in ways.items():
        images = drawn(bundle, method, paper_exact=exact)
        torch.testing.assert_close(images, stepped(process, bundle, method), rtol=0, atol=1e-4)
        assert float(images.abs().max()) <= 1
    same = torch.allclose(*(stepped(process, bundle, method) for process in ways.values()), atol=1e-3)
    assert same == METHODS[method].clip_mean


def test_what_the_caller_says_wins_over_both():
    bundle = small_bundle(Schedule.linear())
    clipped = Sampler(bundle, "NPR-DDIM", 4, clip_mean=True)
    assert clipped.process.bounds.clip_mean
    assert clipped.settings() == Sampler(bundle, "NPR-DDIM", 4, paper_exact=True).settings()
    again = Sampler(bundle, "NPR-DDIM", 4, paper_exact=True, use_clipped_model_output=True)
    assert again.process.use_clipped_model_output
    assert not again.process.keeps_raw_noise


def test_settings_tell_the_two_ways_apart_and_the_papers_are_as_before():
    bundle = small_bundle(Schedule.linear())
    paper, best = (Sampler(bundle, "NPR-DDIM", 4, paper_exact=exact).settings() for exact in (True, False))
    assert "clip_mean" not in paper
    assert best == {**paper, "clip_mean": False}


def test_estimated_rows_of_ddims_process_do_not_clip_the_mean_and_others_are_the_papers():
    for name, method in METHODS.items():
        assert method.clipping(paper_exact=True) == {}
        unclipped = method.eta == 0 and not method.continuous and name != "DDIM"
        assert method.clipping() == {**PAPER, "clip_mean": not unclipped}, name


def test_tables_of_the_paper_draw_as_the_paper_does():
    from optcov.experiments.tables.drawing import _sampler

    settings = {"method": "NPR-DDIM", "steps": 4, "seed": 0, "times": None, "tolerance": None}
    assert _sampler(small_bundle(Schedule.linear()), settings).clipping == {}


def test_attach_takes_either_way():
    from diffusers import DDPMPipeline, DDPMScheduler

    from optcov import attach
    from small_bundles import small_unet

    bundle = small_bundle(Schedule.linear())
    for exact in (True, False):
        pipeline = attach(DDPMPipeline(small_unet(), DDPMScheduler()), bundle, "NPR-DDIM", paper_exact=exact)
        assert pipeline.scheduler.config.clip_mean is exact


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paper_exact": "yes"}, "paper_exact = 'yes' is not a switch"),
        ({"clip_mean": 3}, "clip_mean = 3 is not a switch"),
        ({"method": "UniPC", "clip_mean": True}, "UniPC has no covariance: leave ocm_probes, clip_mean"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(small_bundle(Schedule.linear()), **{"method": "NPR-DDIM", "steps": 4, **options})
