"""Bridge 2M and Matched 2M in a pipeline of diffusers: they draw what the bundle draws."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    ScoreSdeVeScheduler,
)

from optcov import Schedule
from optcov.bundle import Bundle, Sampler
from optcov.integrations.diffusers import (
    BridgeScheduler,
    FlowMatchBridgeScheduler,
    FlowMatchOptimalCovarianceScheduler,
    MatchedScheduler,
    OptimalCovarianceScheduler,
    attach,
)
from optcov.noise import batch_noise
from small_bundles import SHAPE, small_bundle, small_unet

IMAGES = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return small_bundle(Schedule.linear()).with_matched_noise(IMAGES, steps=4, samples=32)


def attached(bundle: Bundle, method: str = "Matched 2M") -> DDPMPipeline:
    return attach(DDPMPipeline(small_unet(), DDPMScheduler()), bundle, method)


@torch.no_grad()
@pytest.mark.parametrize("method", ["Bridge 2M", "Matched 2M"])
def test_steps_in_a_pipeline_are_the_bundles(bundle, method):
    seen = []
    expected = Sampler(bundle, method, 4).draw(range(2), callback=seen.append).x_0
    pipeline, x = attached(bundle, method), batch_noise(0, range(2), 0, SHAPE)
    pipeline.scheduler.set_timesteps(4)
    for number, t in enumerate(pipeline.scheduler.timesteps, start=1):
        noise = batch_noise(0, range(2), number, SHAPE)
        output = pipeline.unet(x, t).sample
        step = pipeline.scheduler.step(output, t, x, variance_noise=noise)
        if seen[number - 1].s > 0:
            assert torch.allclose(step.log_prob, seen[number - 1].log_prob(), rtol=1e-3, atol=0.1)
        x = step.prev_sample
    assert step.log_prob is None
    assert torch.allclose(x, expected, atol=1e-4)


def test_a_whole_pipeline_runs_and_repeats_itself(bundle):
    pipeline = attached(bundle)
    pipeline.set_progress_bar_config(disable=True)
    first, second = (
        pipeline(2, torch.Generator().manual_seed(1), num_inference_steps=4, output_type="np").images for _ in range(2)
    )
    assert first.shape == (2, 8, 8, 1)
    assert torch.allclose(torch.tensor(first), torch.tensor(second), atol=1e-5)


def test_other_numbers_of_steps_and_wrong_orders_are_refused(bundle):
    scheduler, x = attached(bundle).scheduler, torch.zeros(1, *SHAPE)
    with pytest.raises(ValueError, match=r"no matched noise for 5 steps \(there is for: 4\)"):
        scheduler.set_timesteps(5)
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match="does not follow"):
        scheduler.step(x, scheduler.timesteps[1], x)
    with pytest.raises(ValueError, match="is not one of this run's"):
        scheduler.step(x, 7, x)
    with pytest.raises(ValueError, match="call set_timesteps"):
        MatchedScheduler().step(x, 999, x)


def test_noise_of_another_schedule_is_left_out(bundle):
    other = MatchedScheduler(num_train_timesteps=50)
    other.use(bundle.matched)
    with pytest.raises(ValueError, match="there is for: none"):
        other.set_timesteps(4)


def test_attach_to_a_ddim_pipeline_ignores_its_eta(bundle):
    pipeline = attach(DDIMPipeline(small_unet(), DDPMScheduler()), bundle, "Matched 2M")
    assert isinstance(pipeline.scheduler, MatchedScheduler)


def walked(scheduler, begin=0):
    """Steps of a run by random outputs: (timestep, output, x_t, what the step returned)."""
    generator, seen = torch.Generator().manual_seed(0), []
    x = torch.randn(2, *SHAPE, generator=generator)
    scheduler.set_timesteps(5)
    scheduler.set_begin_index(begin)
    for t in scheduler.timesteps[begin:]:
        output = torch.randn(2, *SHAPE, generator=generator)
        seen.append((t, output, x, scheduler.step(output, t, x, generator=generator)))
        x = seen[-1][-1].prev_sample
    return seen


@pytest.mark.parametrize("scheduler", [BridgeScheduler(), FlowMatchBridgeScheduler(shift=3.0)])
def test_a_draw_made_before_is_scored_again_step_by_step(scheduler):
    seen = walked(scheduler)
    scheduler.set_timesteps(5)
    for t, output, x, made in seen[:-1]:
        again = scheduler.step(output, t, x, prev_sample=made.prev_sample)
        assert torch.allclose(again.log_prob, made.log_prob, rtol=1e-6)
        assert torch.equal(again.prev_sample, made.prev_sample)


@pytest.mark.parametrize("scheduler", [BridgeScheduler(), FlowMatchBridgeScheduler(shift=3.0)])
def test_a_run_may_begin_at_a_later_time(scheduler):
    seen = walked(scheduler, begin=2)
    assert len(seen) == 3
    assert all(made.prev_sample.isfinite().all() for *_, made in seen)


@pytest.mark.parametrize(("eta", "said"), [(0.0, "above 0 and at most 1"), (2.0, "at most 1"), ("a", "not a number")])
def test_a_share_of_noise_that_is_none_is_refused(eta, said):
    for kind in (BridgeScheduler, FlowMatchBridgeScheduler):
        with pytest.raises(ValueError, match=said):
            kind(bridge_eta=eta)


def test_the_last_step_starts_where_its_setting_says():
    usual, later = BridgeScheduler(), BridgeScheduler(bridge_first_sigma=0.15)
    for scheduler in (usual, later):
        scheduler.set_timesteps(10)
    levels = [Schedule.linear().log_snr(int(scheduler.timesteps[-1]) + 1) for scheduler in (usual, later)]
    ratios = [float((-level / 2).exp()) for level in levels]
    assert ratios == pytest.approx([0.05, 0.15], rel=0.05)
    with pytest.raises(ValueError, match="such as 0.15"):
        BridgeScheduler(bridge_first_sigma=0)


def test_the_eta_of_another_scheduler_is_not_its_own():
    for eta in (0.0, 1.0):
        config = OptimalCovarianceScheduler(eta=eta).config
        assert BridgeScheduler.from_config(config).config.bridge_eta == 0.3
        config = FlowMatchOptimalCovarianceScheduler(eta=eta).config
        assert FlowMatchBridgeScheduler.from_config(config).config.bridge_eta == 0.3


def test_the_scheduler_of_another_process_is_refused():
    with pytest.raises(ValueError, match="one of flow matching"):
        BridgeScheduler.from_config(FlowMatchEulerDiscreteScheduler().config)
    for kind in (FlowMatchBridgeScheduler, FlowMatchOptimalCovarianceScheduler):
        with pytest.raises(ValueError, match="has betas, so its network is none of flow matching"):
            kind.from_config(DDIMScheduler().config)
        for other in (EDMEulerScheduler(), ScoreSdeVeScheduler()):
            with pytest.raises(ValueError, match="has the sigmas of .* such as FlowMatchEulerDiscreteScheduler"):
                kind.from_config(other.config)
        assert kind.from_config(FlowMatchHeunDiscreteScheduler(shift=3.0).config).config.shift == 3.0
        with pytest.raises(ValueError, match="stochastic_sampling=True has no counterpart"):
            kind(stochastic_sampling=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_train_timesteps": -1}, "num_train_timesteps = -1 is not a positive whole number"),
        ({"clip_sample": True, "clip_sample_range": -1.0}, "clip_sample_range = -1.0 is not positive"),
        ({"prediction_type": "flow_prediction"}, "has no betas; take FlowMatchBridgeScheduler"),
        ({"prediction_type": "x"}, "'x' is not one of epsilon, sample, v_prediction; pass one of them"),
        *(
            (
                {"bridge_image_shape": shape},
                r"bridge_image_shape = .* is not a list of positive whole numbers; pass \(C",
            )
            for shape in ([], [0], [1, 0, 0], [1, 28, -28], [1.5, 2.5], [float("nan"), 2, 2], 28, "a", [1, "a"])
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        BridgeScheduler(**settings)


def test_the_config_of_any_scheduler_with_betas_is_enough(tmp_path):
    theirs = DDIMScheduler(num_train_timesteps=50, beta_schedule="scaled_linear", prediction_type="v_prediction")
    pipeline = DDPMPipeline(small_unet(), BridgeScheduler.from_config(theirs.config))
    pipeline.save_pretrained(tmp_path)
    again = DDPMPipeline.from_pretrained(tmp_path)
    assert isinstance(again.scheduler, BridgeScheduler)
    assert again.scheduler.config.prediction_type == "v_prediction"
    assert torch.allclose(again.scheduler.alphas_cumprod.float(), theirs.alphas_cumprod, atol=1e-6)
    again.set_progress_bar_config(disable=True)
    assert again(2, num_inference_steps=3, output_type="np").images.shape == (2, 8, 8, 1)


@pytest.mark.parametrize(
    ("output", "sample", "said"),
    [
        (torch.zeros(3, *SHAPE), torch.zeros(2, *SHAPE), "may differ in their channels only"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, *SHAPE), "may differ in their channels only"),
        (torch.zeros(2, *SHAPE), torch.zeros(2, *SHAPE, dtype=torch.int64), "pass floating point"),
        (torch.zeros(2, 1, 8, 8), torch.zeros(2, 3, 8, 8), "1 channels for 3"),
        (None, torch.zeros(2, *SHAPE), "model_output is a NoneType; pass a tensor"),
        (torch.zeros(4), torch.zeros(4), r"model_output has shape \(4,\); pass a batch of images"),
        (torch.full((2, *SHAPE), torch.nan), torch.zeros(2, *SHAPE), r"samples \[0, 1\] by NaN or infinity; check the"),
    ],
)
@pytest.mark.parametrize("kind", [BridgeScheduler, OptimalCovarianceScheduler])
def test_what_is_no_answer_to_the_sample_is_refused(output, sample, said, kind):
    scheduler = kind()
    scheduler.set_timesteps(3)
    if kind is OptimalCovarianceScheduler and said == "1 channels for 3":
        said = "needs an output of 3 channels, but the network returned 1"
    with pytest.raises(ValueError, match=said):
        scheduler.step(output, scheduler.timesteps[0], sample)


@pytest.mark.parametrize("timestep", [999.7, None, "a", float("nan"), torch.tensor([999, 1]), torch.eye(40)])
@pytest.mark.parametrize("kind", [BridgeScheduler, OptimalCovarianceScheduler])
def test_a_timestep_that_is_no_whole_number_is_refused(timestep, kind):
    scheduler, x = kind(), torch.zeros(1, *SHAPE)
    scheduler.set_timesteps(3)
    with pytest.raises(ValueError, match=r"^timestep = .* is not a whole number; pass one of 0"):
        scheduler.step(x, timestep, x)


@pytest.mark.parametrize("kind", [FlowMatchBridgeScheduler, FlowMatchOptimalCovarianceScheduler])
def test_a_time_of_a_flow_that_is_none_of_the_runs_is_refused(kind):
    scheduler, x = kind(), torch.zeros(1, *SHAPE)
    scheduler.set_timesteps(3)
    for timestep, said in ((None, "timestep = None is not a number"), (0.5, "timestep 0.5 is not one of this run's")):
        with pytest.raises(ValueError, match=said):
            scheduler.step(x, timestep, x)


@pytest.mark.parametrize("begin", [1.5, "a", None, -1])
def test_a_beginning_that_is_no_place_is_refused(begin):
    scheduler = BridgeScheduler()
    scheduler.set_timesteps(3)
    with pytest.raises(ValueError, match=r"begin_index = .* is not the number .* pass a whole number from 0 to 2"):
        scheduler.set_begin_index(begin)


@pytest.mark.parametrize("kind", [BridgeScheduler, OptimalCovarianceScheduler])
def test_noise_that_is_no_tensor_is_refused(kind):
    scheduler, x = kind(), torch.zeros(1, *SHAPE)
    scheduler.set_timesteps(3)
    with pytest.raises(ValueError, match="variance_noise is a str; pass a tensor"):
        scheduler.step(x, scheduler.timesteps[0], x, variance_noise="a")


@pytest.mark.parametrize("scheduler", [BridgeScheduler(), OptimalCovarianceScheduler()])
def test_an_empty_batch_takes_every_step(scheduler):
    x = torch.zeros(0, *SHAPE)
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:
        x = scheduler.step(x, t, x).prev_sample
    assert x.shape == (0, *SHAPE)


@pytest.mark.parametrize("scheduler", [BridgeScheduler(), OptimalCovarianceScheduler(eta=1.0)])
def test_a_draw_of_another_shape_is_refused_and_one_of_nan_is_impossible(scheduler):
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    scheduler.set_timesteps(3)
    with pytest.raises(ValueError, match="pass the draw that was made from it"):
        scheduler.step(x, scheduler.timesteps[0], x, prev_sample=x[0])
    nowhere = x.clone()
    nowhere[1, 0, 0, 0] = float("nan")
    found = scheduler.step(x, scheduler.timesteps[0], x, prev_sample=nowhere).log_prob
    assert found[0].isfinite()
    assert found[1] == -torch.inf


def test_another_batch_in_the_middle_of_a_run_is_refused():
    scheduler, x = BridgeScheduler(), torch.zeros(2, *SHAPE)
    scheduler.set_timesteps(3)
    scheduler.step(x, scheduler.timesteps[0], x)
    with pytest.raises(ValueError, match="call set_timesteps before another batch"):
        scheduler.step(x[:1], scheduler.timesteps[1], x[:1])
    with pytest.raises(ValueError, match="begin_index = 99 is not"):
        scheduler.set_begin_index(99)


def test_steps_that_end_in_nan_are_refused():
    scheduler, x = BridgeScheduler(prediction_type="v_prediction"), torch.full((1, *SHAPE), float("nan"))
    scheduler.set_timesteps(2)
    said = torch.zeros(1, *SHAPE)
    scheduler.step(said, scheduler.timesteps[0], x)
    with pytest.raises(ValueError, match="ended as NaN"):
        scheduler.step(said, scheduler.timesteps[1], x)
