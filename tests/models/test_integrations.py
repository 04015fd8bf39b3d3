"""optcov inside diffusers: the scheduler against diffusers' own, the wrapped U-Net, pipelines, save and load."""

from __future__ import annotations

import copy
import math

import diffusers
import pytest
import torch
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    LDMPipeline,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)

from close_outputs import assert_close_outputs
from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory
from optcov.bundle import Bundle, NumbersPerTime
from optcov.integrations.diffusers import OptimalCovarianceScheduler, UNetWithHead, attach
from optcov.methods import HEAD_METHOD, METHODS
from optcov.networks import Backbone, ConvHead, HeadedNetwork, ResidualHead, TimeArgument, fingerprint
from optcov.prediction import Prediction
from optcov.sampling import sample
from optcov.solvers.peers import use_alpha_bar
from small_bundles import small_bundle, small_unet

N = 50
SHAPE = (2, 1, 8, 8)
BETAS = [
    {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.2},
    {"beta_schedule": "scaled_linear", "beta_start": 1e-3, "beta_end": 0.15},
    {"beta_schedule": "squaredcos_cap_v2"},
]
PREDICTIONS = ["epsilon", "sample", "v_prediction"]
STRIDED = [40, 30, 20, 10, 0]


def tiny_unet(out_channels: int = 1, seed: int = 0) -> UNet2DModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=out_channels,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
        )
    return unet.eval().requires_grad_(False)


def filled_head(kind=ConvHead, seed: int = 1, **options):
    """A head whose last layer is not zero, so that its output depends on the features."""
    head = kind(8, 1, groups=4, **options).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    head.conv.weight.copy_(0.1 * torch.randn(head.conv.weight.shape, generator=generator))
    return head


def tiny_bundle(schedule=None, heads=("sn", "npr"), **options) -> Bundle:
    schedule = schedule or Schedule.linear(N)
    network = HeadedNetwork(
        Backbone.of(tiny_unet()), schedule, {name: filled_head(seed=i) for i, name in enumerate(heads)}, **options
    ).eval()
    times = (
        torch.linspace(0.02, 1.0, 50, dtype=torch.float64)
        if schedule.steps is None
        else torch.arange(1, N + 1).double()
    )
    share = torch.linspace(0.6, 0.99, 50, dtype=torch.float64)
    return Bundle(network, (1, 8, 8), numbers=NumbersPerTime(times, share, 1 - share))


def noise(seed: int, shape=SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ours_and_theirs(scheduler_class, betas, prediction, eta, **options):
    ours = OptimalCovarianceScheduler(N, prediction_type=prediction, eta=eta, **betas, **options)
    theirs = scheduler_class(N, prediction_type=prediction, timestep_spacing="leading", **betas)
    use_alpha_bar(theirs, ours.schedule)
    return ours, theirs


def run(scheduler, timesteps, seed=0):
    """Step through with model outputs that depend on the sample; returns every sample on the way."""
    x, generator, seen = noise(3), torch.Generator().manual_seed(seed), []
    for t in timesteps:
        output = 0.7 * torch.sin(2 * x) + 0.1 * noise(100 + t)
        x = scheduler.step(output, t, x, generator=generator).prev_sample
        seen.append(x)
    return torch.stack(seen)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("betas", BETAS, ids=lambda b: b["beta_schedule"])
def test_beta_tilde_is_ddpm_step_for_step(betas, prediction, strided):
    ours, theirs = ours_and_theirs(DDPMScheduler, betas, prediction, eta=1.0)
    if strided:
        ours.set_timesteps(timesteps=STRIDED)
        theirs.set_timesteps(timesteps=STRIDED)
    assert ours.timesteps.tolist() == theirs.timesteps.tolist()
    assert (run(ours, ours.timesteps.tolist()) - run(theirs, ours.timesteps.tolist())).abs().max() <= 1e-5


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("betas", BETAS, ids=lambda b: b["beta_schedule"])
def test_eta_zero_is_ddim_step_for_step(betas, prediction, strided):
    ours, theirs = ours_and_theirs(DDIMScheduler, betas, prediction, eta=0.0)
    theirs.set_timesteps(5 if strided else N)
    ours.set_timesteps(timesteps=theirs.timesteps.tolist())
    assert len(ours.timesteps) == (5 if strided else N)
    assert (run(ours, ours.timesteps.tolist()) - run(theirs, ours.timesteps.tolist())).abs().max() <= 1e-5


def test_diffusers_pipeline_draws_the_same_images_with_ours():
    unet = tiny_unet()
    ours, theirs = ours_and_theirs(DDPMScheduler, BETAS[0], "epsilon", eta=1.0)
    images = [
        DDPMPipeline(unet, scheduler)(
            batch_size=2, num_inference_steps=N, output_type="pt", generator=torch.Generator().manual_seed(1)
        ).images
        for scheduler in (ours, theirs)
    ]
    assert (images[0] - images[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("clip_mean", [True, False])
@pytest.mark.parametrize("method", ["SN-DDPM", "NPR-DDIM", "A-DDPM", "A-DDIM", "DDIM", "DDPM, beta"])
def test_attached_pipeline_draws_what_the_bundle_does(method, clip_mean):
    """Same start and step noise through a pipeline and through optcov.sample: one set of formulas."""
    bundle = tiny_bundle()
    pipeline = attach(DDPMPipeline(tiny_unet(seed=9), DDPMScheduler(N)), bundle, method, clip_mean=clip_mean)
    images = pipeline(
        batch_size=2, num_inference_steps=6, output_type="pt", generator=torch.Generator().manual_seed(1)
    ).images
    generator = torch.Generator().manual_seed(1)
    x_0 = sample(
        bundle.reverse_process(method, clip_mean=clip_mean),
        bundle.trajectory(6),
        start=torch.randn(SHAPE, generator=generator),
        noise=lambda t, s: torch.randn(SHAPE, generator=generator),
        noise_cap=bundle.noise_cap(method),
    )
    assert (images - (x_0 / 2 + 0.5).clamp(0, 1)).abs().max() <= 1e-5


def test_attach_takes_the_npr_head_unless_told():
    scheduler = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), tiny_bundle()).scheduler
    row = METHODS[HEAD_METHOD]
    assert (scheduler.config.covariance, scheduler.config.eta) == (row.covariance, row.eta)


def test_attach_works_on_ddim_pipeline_and_its_own_eta_wins():
    bundle = tiny_bundle()
    pipeline = attach(DDIMPipeline(tiny_unet(), DDIMScheduler(N)), bundle, "SN-DDPM")
    assert isinstance(pipeline.scheduler, OptimalCovarianceScheduler)
    images = [
        pipeline(
            batch_size=2, num_inference_steps=5, output_type="pt", eta=eta, generator=torch.Generator().manual_seed(1)
        ).images
        for eta in (0.0, 1.0)
    ]
    assert torch.equal(*images)
    expected = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), bundle, "SN-DDPM")(
        batch_size=2, num_inference_steps=5, output_type="pt", generator=torch.Generator().manual_seed(1)
    ).images
    assert torch.allclose(images[0], expected)


@pytest.mark.parametrize("method", ["SN-DDIM", "A-DDPM"])
def test_pipeline_survives_saving_and_loading(tmp_path, method):
    pipeline = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), tiny_bundle(), method)
    pipeline.save_pretrained(tmp_path)
    loaded = DDPMPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.scheduler, OptimalCovarianceScheduler)
    assert isinstance(loaded.unet, UNetWithHead)
    before, after = (
        p(batch_size=2, num_inference_steps=4, output_type="pt", generator=torch.Generator().manual_seed(1)).images
        for p in (pipeline, loaded)
    )
    assert_close_outputs(after, before, tolerance=1e-4)  # SN takes a root of a small difference at each step


def test_saved_ddim_pipeline_needs_its_scheduler_back(tmp_path):
    """DDIMPipeline's constructor, which from_pretrained calls, puts a DDIMScheduler in the place of any other."""
    pipeline = attach(DDIMPipeline(tiny_unet(), DDIMScheduler(N)), tiny_bundle(), "NPR-DDIM")
    pipeline.save_pretrained(tmp_path)
    loaded = DDIMPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.scheduler, DDIMScheduler)
    loaded.scheduler = OptimalCovarianceScheduler.from_pretrained(tmp_path, subfolder="scheduler")
    before, after = (
        p(batch_size=2, num_inference_steps=4, output_type="pt", generator=torch.Generator().manual_seed(1)).images
        for p in (pipeline, loaded)
    )
    assert_close_outputs(after, before)


def test_scheduler_config_survives_saving_and_loading(tmp_path):
    scheduler = OptimalCovarianceScheduler(
        N,
        trained_betas=Schedule.cosine(N).betas.tolist(),
        covariance="npr_isotropic",
        mean_square_residual=[0.1 / (1 + t) for t in range(N + 1)],
        eta=0.5,
        noise_cap=2.0,
        trajectories={"3": [1, 7, 50]},
    )
    scheduler.save_pretrained(tmp_path)
    loaded = OptimalCovarianceScheduler.from_pretrained(tmp_path)
    assert torch.equal(loaded.alphas_cumprod, Schedule.cosine(N).alpha_bar(torch.arange(1, N + 1)))
    for each in (scheduler, loaded):
        each.set_timesteps(3)
        assert each.timesteps.tolist() == [49, 6, 0]
    assert torch.equal(run(scheduler, [49, 6, 0]), run(loaded, [49, 6, 0]))


@pytest.mark.parametrize("kind", [ConvHead, ResidualHead])
def test_wrapped_unet_returns_noise_and_head_and_saves_as_one_model(tmp_path, kind):
    unet = tiny_unet()
    head = filled_head(kind, **({"time_channels": 32} if kind is ResidualHead else {}))
    network = HeadedNetwork(Backbone.of(unet), Schedule.linear(N), {"npr": head}, TimeArgument(1.0, 1.0))
    wrapped = UNetWithHead.wrap(unet, head)
    x_t, t = noise(4), 17
    prediction = network(x_t, t + 1)
    output = wrapped(x_t, torch.tensor(t)).sample
    assert_close_outputs(output, torch.cat([prediction.noise, prediction.heads["npr"]], 1))
    wrapped.save_pretrained(tmp_path)
    loaded = UNetWithHead.from_pretrained(tmp_path)
    assert_close_outputs(loaded(x_t, t, return_dict=False)[0], output)
    assert (loaded.config.in_channels, loaded.config.sample_size) == (1, 8)


def test_network_of_the_vp_sde_meets_diffusers_times_by_noise_level(tmp_path):
    bundle = tiny_bundle(Schedule.vp_sde())
    pipeline = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), bundle, "NPR-DDIM")
    on_grid = bundle.with_schedule(Schedule.linear())
    x_t = noise(4)
    for t in (0, 400, 999):
        expected = on_grid.network(x_t, t + 1)
        assert_close_outputs(pipeline.unet(x_t, t).sample[:, :1], expected.noise)
    pipeline.unet.to(torch.bfloat16)  # half precision rounds weights, not times
    assert torch.equal(pipeline.unet._argument(400, x_t.device), on_grid.network.arguments(401))
    assert next(pipeline.unet.backbone.parameters()).dtype == torch.bfloat16
    assert next(pipeline.unet.moment_head.parameters()).dtype == torch.float32
    assert bool(pipeline.unet(x_t, 400).sample.isfinite().all())
    pipeline.unet.save_pretrained(tmp_path / "half")
    read = UNetWithHead.from_pretrained(tmp_path / "half", torch_dtype=torch.bfloat16)
    assert_close_outputs(read(x_t, 400).sample, pipeline.unet(x_t, 400).sample, 0.02)


@pytest.mark.parametrize(
    ("native", "kind"),
    [(Schedule.flow(), "v_prediction"), (Schedule.edm(), "epsilon"), (Schedule.ve_sde(), "sample")],
    ids=["flow", "edm", "ve_sde"],
)
@pytest.mark.parametrize("method", ["DDIM", "NPR-DDIM", "Bridge 2M"])
@pytest.mark.filterwarnings("ignore:.*outside those the network was trained on")
def test_network_of_another_process_sees_x_t_with_the_noise_that_it_knows(tmp_path, native, kind, method):
    bundle = Bundle(HeadedNetwork(Backbone.of(tiny_unet()), native, parameterisation=kind).eval(), SHAPE[1:])
    bundle = bundle.with_heads({"npr": filled_head()}, bundle.fingerprint)
    pipeline = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), bundle, method)
    on_grid = bundle.with_schedule(Schedule.linear())
    pipeline.unet.save_pretrained(tmp_path)
    loaded = UNetWithHead.from_pretrained(tmp_path)
    x_t = noise(4)
    for t in (0, 400, 999):
        expected = on_grid.network(x_t, t + 1)
        for unet in (pipeline.unet, loaded):
            found = unet(x_t, t).sample
            assert_close_outputs(found[:, :1], expected.output)
            if method == "NPR-DDIM":
                assert_close_outputs(found[:, 1:], expected.heads["npr"])


def autocast(network, enabled: bool):
    """The same network with its convolutions in bf16."""

    def predict(x_t, t):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return network(x_t, t)

    return predict


def near_in_half_precision(exact: torch.Tensor, half: torch.Tensor) -> bool:
    """bf16 has 8 bits: images in [-1, 1] end within 0.1 of float32, root mean square, and none is NaN.

    The widest is SN, which takes the square root of a small difference of h and eps_hat^2.
    """
    return bool(half.isfinite().all()) and 0 < float((exact - half).square().mean().sqrt()) < 0.1


@pytest.mark.parametrize("method", ["SN-DDIM", "NPR-DDPM"])
def test_network_under_bf16_autocast_stays_near_float32_in_a_pipeline(method):
    pipeline = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), tiny_bundle(), method)
    pipeline.scheduler.set_timesteps(5)
    images = []
    for enabled in (False, True):
        x, unet, generator = noise(5), autocast(pipeline.unet, enabled), torch.Generator().manual_seed(2)
        for t in pipeline.scheduler.timesteps:
            output = unet(x, t).sample
            step_noise = torch.randn(SHAPE, generator=generator)
            x = pipeline.scheduler.step(output, t, x, variance_noise=step_noise).prev_sample
        assert (output.dtype, x.dtype) == (torch.float32, torch.float32)  # variances are never in half precision
        images.append(x)
    assert near_in_half_precision(*images)


@pytest.mark.parametrize("method", ["SN-DDIM", "NPR-DDPM"])
def test_network_under_bf16_autocast_stays_near_float32_in_our_sampler(method):
    bundle = tiny_bundle()
    process = bundle.reverse_process(method)
    images = []
    for enabled in (False, True):
        process.network = autocast(bundle.network, enabled)
        images.append(sample(process, bundle.trajectory(5), SHAPE, seed=2, noise_cap=1.0))
    assert near_in_half_precision(*images)


def test_step_returns_mean_and_variance_of_the_clean_image():
    scheduler = OptimalCovarianceScheduler(N, covariance="npr", eta=0.0)
    g, output = torch.rand(SHAPE) * 0.1, noise(1)
    x_t = noise(2)
    step = scheduler.step(torch.cat([output, g], 1), 30, x_t)
    alpha_bar, beta_bar = scheduler.schedule.alpha_bar(31), scheduler.schedule.beta_bar(31)
    mean = ((x_t - beta_bar.sqrt() * output) / alpha_bar.sqrt()).clamp(-1, 1)
    assert torch.allclose(step.pred_original_sample, mean, atol=1e-6)
    assert torch.allclose(step.pred_original_variance, (beta_bar / alpha_bar * g).clamp(0, 1), atol=1e-6)
    assert step.pred_original_variance.shape == SHAPE
    as_tuple = scheduler.step(torch.cat([output, g], 1), 30, x_t, return_dict=False, variance_noise=torch.zeros(SHAPE))
    assert torch.equal(as_tuple[1], step.pred_original_sample)


def test_learned_range_reads_an_improved_ddpm_network():
    ours, theirs = ours_and_theirs(DDPMScheduler, BETAS[0], "epsilon", eta=1.0, covariance="range")
    theirs.variance_type = "learned_range"
    theirs.register_to_config(variance_type="learned_range")
    x_t, output = noise(2), torch.cat([noise(3), noise(4).tanh()], 1)
    steps = [s.step(output, 30, x_t, generator=torch.Generator().manual_seed(0)) for s in (ours, theirs)]
    assert torch.allclose(steps[0].prev_sample, steps[1].prev_sample, atol=1e-5)
    assert steps[0].pred_original_variance is None


def test_noise_cap_holds_on_the_step_before_the_last():
    scheduler = OptimalCovarianceScheduler(N, covariance="npr", noise_cap=1.0)
    scheduler.set_timesteps(timesteps=[40, 20, 5])
    output, x_t = torch.cat([noise(1), torch.full(SHAPE, 0.5)], 1), noise(2)

    def spread(t: int) -> float:
        draws = [scheduler.step(output, t, x_t, variance_noise=torch.full(SHAPE, z)).prev_sample for z in (0.0, 1.0)]
        return float((draws[1] - draws[0]).max())

    cap = 2 / 255 * math.sqrt(math.pi / 2)
    assert spread(40) > 2 * cap
    assert spread(20) == pytest.approx(cap, rel=1e-4)
    assert spread(5) == 0  # the last step shows its mean


def test_timesteps_are_even_ours_minus_one_unless_a_trajectory_is_given():
    scheduler = OptimalCovarianceScheduler(1000, trajectories={"4": [2, 30, 500, 1000]})
    assert scheduler.timesteps.tolist() == list(range(999, -1, -1))
    scheduler.set_timesteps(15)
    assert scheduler.timesteps.tolist() == [t - 1 for t in reversed(Trajectory.even(Schedule.linear(), 15).times)]
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [999, 499, 29, 1]
    scheduler.set_timesteps(1)
    assert scheduler.timesteps.tolist() == [999]
    assert scheduler.step(noise(1), 999, noise(2)).prev_sample.isfinite().all()


def test_attach_takes_optimal_trajectories_on_request():
    bundle = tiny_bundle().with_trajectories("SN-DDIM", [Trajectory((1, 5, N))])
    pipeline = DDPMPipeline(tiny_unet(), DDPMScheduler(N))
    for kind, expected in (("optimal", [49, 4, 0]), ("even", [49, 25, 0])):
        scheduler = attach(pipeline, bundle, "SN-DDIM", trajectory=kind).scheduler
        scheduler.set_timesteps(3)
        assert scheduler.timesteps.tolist() == expected
    with pytest.raises(ValueError, match="no optimal trajectories for 'NPR-DDIM'"):
        attach(pipeline, bundle, "NPR-DDIM", trajectory="optimal")


def test_unchanged_network_stays_unchanged():
    bundle = tiny_bundle(time_argument=TimeArgument(1.0, 1.0))
    pipeline = attach(DDPMPipeline(tiny_unet(), DDPMScheduler(N)), bundle, "A-DDPM")
    assert pipeline.unet is bundle.unet
    assert fingerprint(pipeline.unet) == bundle.fingerprint


def test_add_noise_and_velocity_are_diffusers_own():
    ours, theirs = ours_and_theirs(DDPMScheduler, BETAS[0], "epsilon", eta=1.0)
    for timesteps in (torch.tensor([3, 49]), torch.tensor([7])):
        for name in ("add_noise", "get_velocity"):
            mine, other = (getattr(s, name)(noise(1), noise(2), timesteps) for s in (ours, theirs))
            assert torch.allclose(mine, other, atol=1e-6)
    assert (ours.init_noise_sigma, ours.order, len(ours)) == (1.0, 1, N)
    assert torch.equal(ours.scale_model_input(noise(1), 3), noise(1))


def test_config_of_another_scheduler_is_taken_over():
    theirs = DDIMScheduler(
        num_train_timesteps=N, beta_schedule="scaled_linear", beta_end=0.05, clip_sample=False
    )  # by keyword: diffusers forgets positional settings in from_config
    ours = OptimalCovarianceScheduler.from_config(theirs.config, covariance="beta_tilde", eta=0.0)
    assert ours.config.clip_sample is False
    assert torch.allclose(ours.alphas_cumprod, theirs.alphas_cumprod.double(), rtol=1e-4)


def test_conditional_network_on_latents():
    """Analytic covariance with a UNet2DConditionModel: unchanged network, latents without a range."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
    ).eval()
    scheduler = OptimalCovarianceScheduler(
        N, clip_sample=False, covariance="analytic", mean_square_noise=[0.9] * (N + 1), eta=0.0
    )
    scheduler.set_timesteps(4)
    shape = (2, 4, 8, 8)
    x, text = noise(0, shape), noise(1, (2, 3, 8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in scheduler.timesteps:
            output = scheduler.step(unet(x, t, encoder_hidden_states=text).sample, t, x, generator=generator)
            x = output.prev_sample
    schedule = scheduler.schedule
    assert x.shape == shape
    assert x.isfinite().all()
    expected = float(0.1 * schedule.beta_bar(1) / schedule.alpha_bar(1))  # not clamped by any range
    assert torch.allclose(output.pred_original_variance, torch.tensor(expected), rtol=1e-5)


def test_a_bad_value_stops_at_its_step_with_its_samples():
    scheduler = OptimalCovarianceScheduler(N)
    scheduler.set_timesteps(2)
    output = noise(1)
    output[1] = math.nan
    with pytest.raises(ValueError, match=r"the network answered samples \[1\] by NaN or infinity"):
        scheduler.step(output, 49, noise(2))
    with pytest.raises(ValueError, match=r"samples \[1\] ended as NaN or infinity"):
        scheduler.step(noise(1), 0, output)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OptimalCovarianceScheduler(N, beta_schedule="sigmoid"), "pass the betas as trained_betas"),
        (lambda: OptimalCovarianceScheduler(N, trained_betas=[0.1]), "1 trained_betas, but num_train_timesteps = 50"),
        (lambda: OptimalCovarianceScheduler(N, prediction_type="flow"), "prediction_type = 'flow' is not one of"),
        (lambda: OptimalCovarianceScheduler(N, thresholding=True), "thresholding=True has no counterpart"),
        (lambda: OptimalCovarianceScheduler(N, last_step="x"), "last_step = 'x' is not one of"),
        (lambda: OptimalCovarianceScheduler(N, covariance="analytic"), "pass mean_square_noise="),
        (lambda: OptimalCovarianceScheduler(N, covariance="beta", eta=0.0), "eta = 1"),
        (lambda: OptimalCovarianceScheduler(N, rescale_betas_zero_snr=True), "rescale_betas_zero_snr=True ends with"),
        (lambda: OptimalCovarianceScheduler(N, trajectories={"2": [1, 2, 3]}), "the trajectory for 2 steps has 3"),
        (lambda: OptimalCovarianceScheduler(N, noise_cap=1.0, clip_sample=False), "needs a data_range"),
        (lambda: OptimalCovarianceScheduler(N).set_timesteps(5, timesteps=[1]), "not both"),
        (lambda: OptimalCovarianceScheduler(N).set_timesteps(51), "K = 51 is outside"),
        (lambda: OptimalCovarianceScheduler(N).set_timesteps(timesteps=[1, 2]), "times must increase strictly"),
        (lambda: OptimalCovarianceScheduler(N).set_timesteps(timesteps=[50, 2]), "time 51 is outside this schedule"),
        (
            lambda: OptimalCovarianceScheduler(N).set_timesteps(timesteps=[49.5, 2]),
            "timestep = 49.5 is not a whole",
        ),
        (
            lambda: OptimalCovarianceScheduler(N).step(noise(1, (1, 1, 8, 8)), 5, noise(1)),
            r"returned shape \(1, 1, 8, 8\) for a sample of shape \(2, 1, 8, 8\)",
        ),
        (lambda: OptimalCovarianceScheduler(N).step(noise(1), 50, noise(1)), "timestep 50 is not one of this run's"),
        (
            lambda: OptimalCovarianceScheduler(N, covariance="sn").step(noise(1), 5, noise(1)),
            "needs an output of 2 channels, but the network returned 1",
        ),
        (lambda: UNetWithHead({"_class_name": "Other"}, None), "cannot build a U-Net of class 'Other'"),
        (lambda: attach(None, tiny_bundle(), "SN-DPM"), "runs in continuous time"),
        (lambda: attach(None, tiny_bundle(), "Gotta Go Fast"), "is a solver"),
        (lambda: attach(None, tiny_bundle(heads=("npr",)), "SN-DDIM"), "no head 'sn', which the covariance 'sn' needs"),
        (lambda: attach(None, tiny_bundle(), "SN-DDIM", trajectory="odd"), "trajectory = 'odd' is not one of"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_scheduler_is_the_reverse_process():
    """No second set of formulas: one step of each, with every option away from its default."""
    numbers = torch.linspace(0.5, 0.9, N + 1).tolist()
    scheduler = OptimalCovarianceScheduler(
        N, covariance="analytic", mean_square_noise=numbers, eta=0.4, use_clipped_model_output=True
    )
    process = ReverseProcess(
        lambda x_t, t: None,
        ForwardProcess(scheduler.schedule, 0.4),
        "analytic",
        use_clipped_model_output=True,
        mean_square_noise=torch.tensor(numbers, dtype=torch.float64),
    )
    output, x_t, z = noise(1), noise(2), noise(3)
    scheduler.set_timesteps(timesteps=[40, 9])
    known = Prediction.of(NoisePrediction(output), x_t, 41, *scheduler.schedule.levels(41))
    expected = process.step_from(known, 10).sample(z)
    # the cap of the paper is off by default, though the step lands on the first time
    assert torch.equal(scheduler.step(output, 40, x_t, variance_noise=z).prev_sample, expected)


@pytest.mark.parametrize("value", [-0.5, 1e6])
def test_the_scheduler_counts_each_clamped_variance_once(value):
    scheduler = OptimalCovarianceScheduler(N, covariance="npr", eta=0.0)
    scheduler.set_timesteps(3)
    x = noise(2)
    for t in scheduler.timesteps:
        x = scheduler.step(torch.cat([noise(1), torch.full(SHAPE, value)], 1), t, x).prev_sample
    clamps = scheduler.bounds
    assert clamps.total == 3 * x.numel()
    assert clamps.below + clamps.above == clamps.total


def other_unet(**options):
    settings = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "norm_num_groups": 4, "layers_per_block": 1}
    blocks = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D",) * 2,
        "up_block_types": ("UpBlock2D",) * 2,
    }
    return UNet2DModel(**{**settings, **blocks, **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_channels": 3, "out_channels": 3}, "3 channels, but the bundle's takes images of 1"),
        ({"sample_size": 16}, "16 x 16 pixels, but the bundle's takes 8 x 8"),
        ({"sample_size": (8, 16)}, "8 x 16 pixels, but the bundle's takes 8 x 8"),
        ({"num_class_embeds": 10}, "conditional on a class, but the bundle's is not"),
        ({"class_embed_type": "timestep"}, "conditional on a class, but the bundle's is not"),
    ],
)
def test_attach_refuses_a_pipeline_whose_network_takes_other_images_or_conditions(options, said):
    pipeline = DDPMPipeline(other_unet(**options), DDPMScheduler(N))
    before = pipeline.unet
    with pytest.raises(ValueError, match=said):
        attach(pipeline, tiny_bundle(), "DDIM")
    assert pipeline.unet is before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bundle": "fashion"}, "bundle = 'fashion' is not a Bundle; pass what optcov.load"),
        ({"bundle": None}, "bundle = None is not a Bundle"),
        ({"method": None}, "method = None is not a name of METHODS; pass one such as 'Bridge 2M'"),
        ({"method": 5}, "method = 5 is not a name of METHODS"),
    ],
)
def test_attach_refuses_what_is_no_bundle_or_no_method(options, reason):
    pipeline = DDPMPipeline(small_unet(), DDPMScheduler())
    with pytest.raises(ValueError, match=reason):
        attach(pipeline, **{"bundle": small_bundle(Schedule.linear(24)), **options})


def test_attach_refuses_pipelines_of_other_kinds_by_name():
    class TextPipeline:
        """Stands for a pipeline whose network takes a text."""

        device = torch.device("cpu")
        unet = UNet2DConditionModel(
            sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8,), norm_num_groups=4,
            cross_attention_dim=8, attention_head_dim=4, layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",),
        )  # fmt: skip

    with pytest.raises(ValueError, match="TextPipeline has a UNet2DConditionModel, not an unconditional UNet2DModel"):
        attach(TextPipeline(), tiny_bundle(), "DDIM")
    latent = LDMPipeline(VQModel(norm_num_groups=4, block_out_channels=(4,)), other_unet(), DDIMScheduler(N))
    with pytest.raises(ValueError, match="LDMPipeline draws latents"):
        attach(latent, tiny_bundle(), "DDIM")
    with pytest.raises(ValueError, match="DiTPipeline has no transformer to replace"):
        attach(type("DiTPipeline", (), {"transformer": None})(), tiny_bundle(), "DDIM")


def test_attach_may_be_repeated_with_another_method():
    pipeline = DDPMPipeline(tiny_unet(), DDPMScheduler(N))
    for method in ("NPR-DDIM", "SN-DDPM", "DDIM"):
        attach(pipeline, tiny_bundle(), method)
        assert pipeline.scheduler.config.covariance == METHODS[method].covariance


@pytest.mark.parametrize("kind", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_a_flow_matching_configuration_is_refused_by_name(kind):
    theirs = getattr(diffusers, kind)(num_train_timesteps=N)
    with pytest.raises(ValueError, match=f"{kind} .* flow matching"):
        OptimalCovarianceScheduler.from_config({**theirs.config, "_class_name": kind})  # as in a file
    with pytest.raises(ValueError, match="flow matching"):
        OptimalCovarianceScheduler.from_config(theirs.config)
    with pytest.raises(ValueError, match="flow matching"):
        OptimalCovarianceScheduler.from_config({"num_train_timesteps": N, "shift": 3.0, "use_dynamic_shifting": True})


def test_schedulers_of_ddpms_betas_that_can_do_flow_matching_too_are_refused_where_they_do():
    unipc = diffusers.UniPCMultistepScheduler
    assert OptimalCovarianceScheduler.from_config(unipc(num_train_timesteps=N).config).schedule.steps == N
    with pytest.raises(ValueError, match="flow matching"):
        OptimalCovarianceScheduler.from_config(unipc(use_flow_sigmas=True, prediction_type="flow_prediction").config)


@pytest.mark.parametrize("kind", ["EDMEulerScheduler", "ScoreSdeVeScheduler", "CMStochasticIterativeScheduler"])
def test_a_configuration_without_betas_is_refused_by_name(kind):
    config = {**getattr(diffusers, kind)().config, "_class_name": kind}
    with pytest.raises(ValueError, match=f"{kind} has no betas"):
        OptimalCovarianceScheduler.from_config(config)


def test_a_pipeline_is_told_when_its_own_network_is_replaced(caplog):
    bundle = small_bundle(Schedule.linear())
    pipeline = DDPMPipeline(copy.deepcopy(bundle.unet), DDPMScheduler())
    attach(pipeline, bundle, "NPR-DDIM")
    attach(pipeline, bundle, "DDIM")
    assert not caplog.records
    trained = copy.deepcopy(bundle.unet)
    torch.nn.init.constant_(trained.conv_in.bias, 0.1)
    attach(DDPMPipeline(trained, DDPMScheduler()), bundle, "NPR-DDIM")
    assert ["other weights than that of small" in record.message for record in caplog.records] == [True]
