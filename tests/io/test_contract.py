"""The public names, each used once as the design writes it: positions, and arguments by their names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler

import optcov
from small_bundles import small_bundle, small_unet

METHODS = (
    *("DDPM, beta-tilde", "DDPM, beta", "A-DDPM", "NPR-DDPM", "SN-DDPM", "DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM"),
    *("Improved DDPM", "Euler-Maruyama", "Ancestral sampling", "Probability flow", "A-DPM", "NPR-DPM", "SN-DPM"),
    *("Gotta Go Fast", "OCM-DDPM", "OCM-DDIM", "Spectral-DDPM", "Spectral-DDIM", "CNPR-DDPM", "CNPR-DDIM"),
)
COVARIANCES = (
    "beta_tilde",
    "beta",
    "analytic",
    "npr_isotropic",
    "sn",
    "npr",
    "ocm",
    "range",
    "spectral",
    "npr_correlated",
)
QUICK = {"images": 8, "measure_images": 2, "times": 3, "calibration_samples": 0, "batch_size": 4, "progress": False}
LINEAR = optcov.Schedule.linear(steps=1000)
DATA = optcov.oracle.GaussianMixture(weights=[0.3, 0.7], means=[[-0.5], [0.5]], covariances=[0.01, 0.02])


def network(x_t, t, **condition):
    """A plain function as a network, which keeps what it is told."""
    network.told = condition
    small = torch.full_like(x_t, 0.1)
    heads = {"npr": small, "sn": 1 + small, "ocm": small, "range": small}
    return optcov.NoisePrediction(noise=0.5 * x_t, heads=heads)


@pytest.fixture(scope="module")
def bundle():
    return small_bundle(LINEAR)


@pytest.fixture(scope="module")
def images():
    return torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize(
    ("schedule", "t", "alpha_bar", "beta_bar"),
    [
        (LINEAR, 1, 1 - 1e-4, 1e-4),
        (optcov.Schedule.linear(steps=10, scale=False), 1, 1 - 1e-4, 1e-4),
        (optcov.Schedule.vp_sde(beta_min=0.1, beta_max=20.0), 1.0, math.exp(-10.05), 1 - math.exp(-10.05)),
        (optcov.Schedule.from_betas([0.1, 0.2]), 2, 0.72, 0.28),
        (optcov.Schedule.from_diffusers(DDPMScheduler()), 1, 1 - 1e-4, 1e-4),
        (optcov.Schedule.edm(sigma_min=0.002, sigma_max=80.0), 80.0, 1.0, 6400.0),
        (optcov.Schedule.flow(), 0.25, 0.5625, 0.0625),
    ],
)
def test_a_schedule_tells_its_levels_in_float64(schedule, t, alpha_bar, beta_bar):
    assert float(schedule.alpha_bar(t)) == pytest.approx(alpha_bar, rel=1e-12)
    assert float(schedule.beta_bar(t)) == pytest.approx(beta_bar, rel=1e-9)
    assert float(schedule.log_snr(t)) == pytest.approx(math.log(alpha_bar / beta_bar), rel=1e-9)
    assert schedule.alpha_bar(t).dtype == schedule.beta_bar(t).dtype == schedule.log_snr(t).dtype == torch.float64


def test_the_cosine_schedule_ends_at_its_largest_beta():
    assert float(optcov.Schedule.cosine(steps=1000).betas[-1]) == 0.999


@pytest.mark.parametrize("eta", [1.0, 0.0])
@pytest.mark.parametrize("schedule", [LINEAR, optcov.Schedule.vp_sde(), optcov.Schedule.edm(), optcov.Schedule.flow()])
def test_a_bridge_has_the_three_coefficients_of_the_design(schedule, eta):
    forward = optcov.ForwardProcess(schedule, eta=eta)
    t, s = (500, 400) if schedule is LINEAR else (0.5, 0.4)
    c = -math.expm1(float(schedule.log_snr(t) - schedule.log_snr(s)))
    bb_s, bb_t, ab_s = (float(value) for value in (schedule.beta_bar(s), schedule.beta_bar(t), schedule.alpha_bar(s)))
    bridge = forward.bridge(t, s)
    assert float(bridge.variance) == pytest.approx(eta**2 * bb_s * c, rel=1e-12)
    assert float(bridge.noisy_weight) == pytest.approx(math.sqrt(bb_s / bb_t * (1 - eta**2 * c)), rel=1e-12)
    gamma = math.sqrt(ab_s) * (1 - math.sqrt((1 - c) * (1 - eta**2 * c)))
    assert float(bridge.clean_weight) == pytest.approx(gamma, rel=1e-9)
    last = forward.bridge(torch.tensor([t, t]), torch.zeros(2))
    for found, expected in ((last.clean_weight, 1.0), (last.noisy_weight, 0.0), (last.variance, 0.0)):
        torch.testing.assert_close(found, torch.full((2,), expected, dtype=torch.float64), rtol=0, atol=1e-12)
    x_0, noise = torch.ones(2, 3), torch.full((2, 3), 2.0)
    expected = float(schedule.alpha_bar(t).sqrt() + 2 * schedule.beta_bar(t).sqrt())
    torch.testing.assert_close(forward.diffuse(x_0, t, noise), torch.full((2, 3), expected))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_reverse_process_steps_by_every_covariance(covariance):
    numbers = {"analytic": "mean_square_noise", "npr_isotropic": "mean_square_residual"}.get(covariance)
    x_t, label = torch.zeros(2, 3), torch.tensor([0, 1])
    for given in (torch.full((1001,), 0.5), lambda t: torch.tensor(0.5)) if numbers else (None,):
        process = optcov.ReverseProcess(
            network,
            optcov.ForwardProcess(LINEAR, eta=1.0),
            covariance=covariance,
            data_range=(-1, 1),
            use_clipped_model_output=None,
            clip_mean=True,
            spectrum=torch.ones(3, dtype=torch.float64) if covariance in ("spectral", "npr_correlated") else None,
            **({numbers: given} if numbers else {}),
        )
        step = process.step(x_t, 500, 400, class_labels=label)
        assert network.told["class_labels"] is label
        assert step.mean.shape == torch.broadcast_shapes(step.mean.shape, step.variance.shape) == (2, 3)
        if covariance != "range":
            assert process.posterior(x_t, 500, class_labels=label).mean.shape == (2, 3)


def test_trajectories_are_as_written():
    assert optcov.Trajectory.even(LINEAR, 5).times == (1, 251, 500, 750, 1000)
    assert optcov.Trajectory.even(optcov.Schedule.vp_sde(), 3).times == pytest.approx((0.001, 0.5, 1.0))
    assert optcov.Trajectory.quadratic(LINEAR, 3).times == (1, 251, 1000)
    edm = optcov.Schedule.edm()
    ends = 0.002 ** (1 / 7), 80 ** (1 / 7)
    expected = [(ends[0] + i / 3 * (ends[1] - ends[0])) ** 7 for i in range(4)]
    assert optcov.Trajectory.karras(edm, 4, rho=7).times == pytest.approx(expected, rel=1e-9)
    costs = np.ones((6, 6))
    assert optcov.Trajectory.optimal(costs, 2).times[-1] == 5
    assert list(optcov.Trajectory.optimal_all(costs, 3)) == [1, 2, 3]
    assert optcov.Trajectory((1, 500)).times == (1, 500)


def test_samples_and_bounds_take_their_arguments_by_name():
    process = optcov.ReverseProcess(network, optcov.ForwardProcess(LINEAR), "npr")
    trajectory = optcov.Trajectory.even(LINEAR, 4)
    options = {"noise_cap": 1.0, "last_step": "mean", "condition": {"class_labels": torch.tensor([0, 1])}}
    drawn = optcov.sample(process, trajectory, shape=(2, 3), seed=0, start=None, noise=None, **options)
    assert drawn.shape == (2, 3)
    start = torch.zeros(2, 3)
    again = optcov.sample(process, trajectory, start=start, noise=lambda t, s: start + (t - s) / 1000, **options)
    assert again.shape == (2, 3)
    for cdf, last_variance in (("exact", "paper"), ("tanh", "own")):
        terms = optcov.elbo(
            *(process, start, trajectory),
            noise=lambda t: start + t / 1000,
            last_variance=last_variance,
            cdf=cdf,
            condition=options["condition"],
        )
        assert (terms.prior.shape, terms.transitions.shape, terms.reconstruction.shape) == ((2,), (2, 3), (2,))
        total = terms.prior + terms.transitions.sum(1) + terms.reconstruction
        torch.testing.assert_close(terms.bits_per_dim(), total / (3 * math.log(2)))


def test_a_table_of_costs_gives_the_array_that_trajectories_take():
    short = optcov.Schedule.linear(steps=40)
    process = optcov.ReverseProcess(
        DATA.network(short, error=None), optcov.ForwardProcess(short), "npr", data_range=None
    )
    costs = optcov.cost_table(process, DATA.sample(8).float(), ["npr"]).costs("npr", last_variance="paper")
    assert costs.shape == (41, 41)
    assert len(optcov.Trajectory.optimal(costs, 5).times) == 5


def test_a_model_is_fitted_sampled_scored_attached_and_saved(images, tmp_path):
    pipeline = DDPMPipeline(small_unet(), DDPMScheduler())
    fitted = optcov.fit(pipeline, images, heads=("sn", "npr"), condition=None, seed=0, **QUICK)
    assert set(fitted.heads) == {"sn", "npr"}
    fitted.save(tmp_path / "bundle")
    loaded = optcov.load(str(tmp_path / "bundle"))
    assert loaded.network.schedule is loaded.schedule
    assert isinstance(loaded.unet, torch.nn.Module)
    assert optcov.attach(pipeline, loaded, method="NPR-DDIM") is pipeline
    assert optcov.integrations.diffusers.attach(pipeline, loaded, "SN-DDIM") is pipeline
    assert isinstance(pipeline.scheduler, optcov.integrations.diffusers.OptimalCovarianceScheduler)


def test_a_bundle_answers_by_the_names_of_its_arguments(bundle, images):
    drawn = bundle.sample(2, method="NPR-DDIM", steps=2, seed=0, condition=None)
    assert drawn.shape == (2, 1, 8, 8)
    assert bundle.bits_per_dim(images[:2], steps=[2, 3], methods=["NPR-DDPM"]).lengths == [2, 3]
    known = bundle.posterior(images[:2], 500)
    assert known.mean.shape == known.variance.shape == (2, 1, 8, 8)
    assert isinstance(bundle.reverse_process("SN-DDIM"), optcov.ReverseProcess)
    assert len(bundle.trajectory(5).times) == 5


def test_a_bundle_tells_classes_apart_and_restores(bundle, images):
    unet = small_unet(num_class_embeds=3)
    known = optcov.fit((unet, LINEAR), (images, torch.arange(40) % 2), heads=("npr",), empty_class=2, **QUICK)
    assert known.class_log_probabilities(images[:2], steps=2).shape == (2, 2)
    assert known.sample(2, steps=2, condition={"class_labels": torch.tensor([0, 1])}, guidance=2.0).shape == (
        2,
        1,
        8,
        8,
    )
    mask = optcov.inverse.Mask.box((1, 8, 8), 2, 2, 4, 4)
    found = optcov.inverse.restore(
        bundle=bundle,
        measurement=mask.apply(images[:1])[0],
        operator=mask,
        noise_std=0.1,
        steps=2,
        method="NPR-DDPM",
        samples=2,
        seed=0,
        condition=None,
    )
    assert found.mean.shape == (1, 8, 8)


def test_the_methods_of_the_design_are_there():
    assert set(METHODS) <= set(optcov.METHODS)
