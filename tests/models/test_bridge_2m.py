"""Bridge 2M on bundles and on data whose every moment is known: it needs nothing but the network."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler
from torch.distributions import Normal

from class_bundles import class_bundle
from optcov import METHODS, ForwardProcess, Schedule
from optcov.bundle import Sampler
from optcov.methods import draw, find_method
from optcov.oracle import GaussianMixture
from optcov.solvers import BridgeNoise, few_step_times
from optcov.solvers.multistep import MOST_EXTRAPOLATED, extrapolation, last_sigma
from small_bundles import small_bundle

NO_SIGNAL = DDPMScheduler(beta_schedule="scaled_linear", rescale_betas_zero_snr=True, prediction_type="v_prediction")
SCHEDULES = {
    "linear": Schedule.linear(),
    "cosine": Schedule.cosine(),
    "no signal at the end": Schedule.from_diffusers(NO_SIGNAL),
    "vp_sde": Schedule.vp_sde(),
    "edm": Schedule.edm(),
    "flow": Schedule.flow(),
}


def test_an_image_depends_on_its_seed_and_number_alone():
    bundle = small_bundle(Schedule.linear())
    together = bundle.sample(5, method="Bridge 2M", steps=4, seed=3, progress=False)
    by_two = bundle.sample(5, method="Bridge 2M", steps=4, seed=3, batch_size=2, progress=False)
    assert torch.allclose(together, by_two, atol=2e-3)
    assert not torch.allclose(together, bundle.sample(5, method="Bridge 2M", steps=4, progress=False), atol=1e-2)


def test_it_is_told_the_class():
    bundle = class_bundle()
    first, second = (bundle.sample(2, method="Bridge 2M", steps=3, labels=y, progress=False) for y in (0, 1))
    assert not torch.allclose(first, second, atol=1e-3)


def test_every_step_but_the_last_has_a_density_and_noise_of_its_own():
    seen = []
    Sampler(small_bundle(Schedule.linear()), "Bridge 2M", 4).draw(range(3), callback=seen.append)
    assert len(seen) == 4
    for step in seen[:-1]:
        forward = ForwardProcess(Schedule.linear(), 0.3)
        wanted = Normal(step.gaussian.mean, forward.bridge(step.t, step.s).variance.sqrt())
        assert torch.allclose(step.log_prob().double(), wanted.log_prob(step.x_s.double()).flatten(1).sum(1), rtol=1e-4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_draws_gaussian_data_ever_better_with_more_steps(name):
    """The standard deviation of the data, 0.5, from 500 samples; its error is 0.016, and the level 4 of them."""
    schedule, data = SCHEDULES[name], GaussianMixture([1.0], [[0.2, -0.3]], [0.25])
    network = data.network(schedule)
    errors = []
    for steps in (4, 16):
        x_0 = draw(find_method("Bridge 2M"), network, schedule, steps, (2,), range(500), data_range=None).x_0
        errors.append(float((x_0.std(0) - 0.5).abs().max()))
        assert torch.allclose(x_0.mean(0), torch.tensor([0.2, -0.3]).to(x_0), atol=0.1)
    assert errors[1] < 4 * 0.016
    assert errors[1] < errors[0] + 4 * 0.016


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_ends_in_almost_pure_noise_costs_no_steps(name):
    """Gaussian data in five steps: 0.85 of its spread at least, from 500 samples, whose error is 0.03 of it."""
    schedule, data = SCHEDULES[name], GaussianMixture([1.0], [[0.0, 0.0]], [0.25])
    x_0 = draw(find_method("Bridge 2M"), data.network(schedule), schedule, 5, (2,), range(500), data_range=None).x_0
    assert 0.85 - 0.06 < float(x_0.std()) / 0.5 < 1.1


def test_the_first_step_starts_at_more_noise_for_larger_images_and_more_steps():
    assert last_sigma(5, (2,)) == last_sigma(5, (1, 28, 28)) == 40
    assert last_sigma(10, (1, 28, 28)) == pytest.approx(0.28 * 28 * 10)
    assert last_sigma(5, (3, 64, 64)) == pytest.approx(0.28 * 64 * 5)
    assert last_sigma(25, (1, 28, 28)) == last_sigma(5, (3, 256, 256)) == last_sigma(5) == 160
    first = [few_step_times(Schedule.cosine(), 5, shape).times[-1] for shape in ((1, 28, 28), None)]
    assert first[0] < first[1] < 1000


def test_a_long_step_after_a_short_one_is_not_extrapolated_without_bound():
    assert extrapolation(Schedule.flow(), 0.5, 0.49, 0.1) == MOST_EXTRAPOLATED
    times = few_step_times(Schedule.linear(), 10).times
    found = [
        float(extrapolation(Schedule.linear(), u, t, s)) for s, t, u in zip(times, times[1:], times[2:], strict=False)
    ]
    assert max(found) < MOST_EXTRAPOLATED


def test_its_noise_is_part_of_what_determines_an_image():
    settings = Sampler(small_bundle(Schedule.linear()), "Bridge 2M", 4).settings()
    other = Sampler(small_bundle(Schedule.linear()), "Bridge 2M", 5).settings()
    assert settings["step_noise"] == {"eta": 0.3}
    assert settings["times"] != other["times"]


def test_it_visits_the_times_of_a_trajectory_that_is_passed():
    bundle = small_bundle(Schedule.linear())
    times = few_step_times(bundle.schedule, 4, bundle.image_shape, first_sigma=0.15)
    settings = Sampler(bundle, "Bridge 2M", 4, trajectory=times).settings()
    assert settings["times"] == list(times.times)
    assert settings["times"][0] > Sampler(bundle, "Bridge 2M", 4).settings()["times"][0]
    own, usual = (bundle.sample(2, steps=4, progress=False, **more) for more in ({"trajectory": times}, {}))
    assert not torch.allclose(own, usual, atol=1e-3)
    for refused in ("karras", [1, 2, 3]):
        with pytest.raises(ValueError, match="times and a last step of its own"):
            Sampler(bundle, "Bridge 2M", 4, trajectory=refused)


@pytest.mark.parametrize("first", [0.0, -1.0, 40.0, float("nan"), "0.1"])
def test_a_last_step_that_starts_nowhere_is_refused(first):
    with pytest.raises(ValueError, match="first_sigma"):
        few_step_times(Schedule.linear(), 5, first_sigma=first)


def test_it_is_no_row_of_the_paper():
    assert "Bridge 2M" not in METHODS
    assert find_method("Bridge 2M").covariance is None


@pytest.mark.parametrize("eta", [0.0, -1.0, 1.5, float("nan")])
def test_an_eta_without_noise_is_refused(eta):
    with pytest.raises(ValueError, match="pass a number above 0 and at most 1"):
        BridgeNoise(Schedule.linear(), few_step_times(Schedule.linear(), 4), eta)


@pytest.mark.parametrize("indices", [[0.5], 3, None])
def test_numbers_of_images_that_are_none_are_refused(indices):
    with pytest.raises(ValueError, match="not a sequence of whole numbers"):
        Sampler(small_bundle(Schedule.linear()), "Bridge 2M", 3).draw(indices)


@pytest.mark.parametrize("labels", [2**70, -(2**70)])
def test_a_class_beyond_all_numbers_is_refused(labels):
    with pytest.raises(ValueError, match="labels"):
        class_bundle().sample(2, labels=labels, steps=2, progress=False)


def test_a_schedule_whose_first_noise_is_large_has_few_step_times():
    schedule = Schedule.from_betas([0.01] * 100)
    assert few_step_times(schedule, 5).times[0] == 1


@pytest.mark.parametrize("steps", [True, 0, 2.5, 1001, 10**9])
def test_too_few_steps_are_refused(steps):
    with pytest.raises(ValueError, match="steps"):
        few_step_times(Schedule.linear(), steps)
