"""Matched 2M on data whose every moment is known: marginals, order of the mean, density, noise by image."""

from __future__ import annotations

import math
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, Schedule, Trajectory
from optcov.gaussian.basis import Basis
from optcov.noise import batch_noise
from optcov.oracle import GaussianMixture
from optcov.prediction import Prediction
from optcov.solvers import DataMoments, MatchedNoise, few_step_times, match_noise, multistep_sample, peer
from optcov.solvers.matching import ring_means
from optcov.solvers.multistep import mean_of_step

ROOT = Path(__file__).parents[2]
SHAPE = (1, 8, 8)
SCHEDULE = Schedule.linear()
TRAJECTORY = Trajectory((60, 160, 330, 620, 1000))
POWER = 2.0 / (1 + torch.arange(64, dtype=torch.float64)).reshape(1, 8, 8)
MEAN = torch.linspace(-0.5, 0.5, 64, dtype=torch.float64).reshape(1, 8, 8)  # by frequency
DATA = DataMoments(MEAN, POWER)


def denoiser(schedule: Schedule):
    """The exact network of Gaussian data whose covariance is diagonal among frequencies."""

    def network(x_t, t):
        a, b = schedule.levels(t)
        gap = Basis().transform(x_t.double()) - a * MEAN
        noise = Basis().inverse(b * gap / (a**2 * POWER + b**2))
        return NoisePrediction(noise.to(x_t.dtype))

    return network


def exact_powers(schedule: Schedule, trajectory: Trajectory, eta: float, floor: float) -> dict[float, torch.Tensor]:
    """p by frequency: everything is linear, so x_t and x0_hat_u are two numbers times independent normals."""
    forward, network_gain = ForwardProcess(schedule, eta), {}
    for t in trajectory.times:
        a, b = schedule.levels(t)
        network_gain[t] = a * POWER / (a**2 * POWER + b**2)  # of x0_hat in x_t, about the means
    var_x, var_d, cov = torch.ones_like(POWER), torch.zeros_like(POWER), torch.zeros_like(POWER)
    found, u = {}, None
    for t, s in trajectory.descending():
        if s == 0:
            return found
        bridge = forward.bridge(t, s)
        w = torch.zeros(()) if u is None else 0.5 * _log_snr_ratio(schedule, u, t, s)
        of_x = bridge.noisy_weight + bridge.clean_weight * (1 + w) * network_gain[t]
        of_d = -bridge.clean_weight * w
        q = of_x**2 * var_x + 2 * of_x * of_d * cov + of_d**2 * var_d
        beta_bar = schedule.beta_bar(s)
        target = schedule.alpha_bar(s) * POWER + beta_bar
        gain = ((target - floor * beta_bar) / q).clamp(max=1).sqrt()
        p = target - gain**2 * q
        cov_new = gain * network_gain[t] * (of_x * var_x + of_d * cov)
        var_d, cov, var_x, u = network_gain[t] ** 2 * var_x, cov_new, target, t
        found[s] = p
    return found


def _log_snr_ratio(schedule, u, t, s):
    return (schedule.log_snr(s) - schedule.log_snr(t)) / (schedule.log_snr(t) - schedule.log_snr(u))


def test_the_oracle_of_this_file_is_the_mixtures_oracle():
    frequencies = Basis().transform(torch.eye(64, dtype=torch.float64).reshape(64, *SHAPE)).flatten(1)
    covariance = frequencies @ torch.diag(POWER.flatten()) @ frequencies.T
    mixture = GaussianMixture([1.0], Basis().inverse(MEAN[None]).reshape(1, 64), covariance[None])
    x_t = batch_noise(0, range(3), 0, SHAPE, torch.float64)
    expected = mixture.network(SCHEDULE)(x_t, 300).noise
    assert torch.allclose(denoiser(SCHEDULE)(x_t, 300).noise, expected, atol=1e-10)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_measured_powers_tend_to_the_closed_form(eta):
    noise = match_noise(
        denoiser(SCHEDULE), SCHEDULE, TRAJECTORY, DATA, eta=eta, samples=6000, rings=None, shrink=True, batch_size=6000
    )
    exact = exact_powers(SCHEDULE, TRAJECTORY, eta, 1e-4)
    for place, s in enumerate(TRAJECTORY.times[:-1], start=1):
        target = SCHEDULE.alpha_bar(s) * POWER + SCHEDULE.beta_bar(s)
        assert float(((noise.power[place] - exact[s]) / target).abs().max()) < 5 * math.sqrt(2 / 6000)


@pytest.mark.parametrize("schedule", [SCHEDULE, Schedule.edm(), Schedule.flow()], ids=["linear", "edm", "flow"])
def test_marginals_of_fresh_samples_are_those_of_the_forward_process(schedule):
    """Mean and power of x_s in every frequency, on images that were not measured; level 5 sigma."""
    trajectory, count = Trajectory.karras(schedule, 6), 4000
    network = denoiser(schedule)
    if schedule.last_time_with_signal < schedule.final_time:  # this network predicts noise, which needs a signal
        trajectory = Trajectory((0.05, 0.2, 0.4, 0.6, 0.8, 0.98))
    noise = match_noise(network, schedule, trajectory, DATA, samples=4000, rings=None, shrink=True, batch_size=4000)
    start = batch_noise(7, range(count), 0, SHAPE) * schedule.unit_data_std(trajectory.times[-1])
    seen = []
    multistep_sample(network, noise, start, 7, callback=seen.append)
    for step in seen[:-1]:
        mean, power = DATA.at(schedule, step.s)
        found = Basis().transform(step.x_s.double())
        spread = math.sqrt(2 * 2 / count)  # of a variance, both of the measured batch and of this one
        assert float(((found.mean(0) - mean) / power.sqrt()).abs().max()) < 5 * math.sqrt(2 / count)
        assert float((found.var(0) / power - 1).abs().max()) < 5 * spread


def test_a_small_batch_measures_linear_data_exactly():
    """Its noise is standardised, so that nothing of its own fluctuation is left where the network is linear."""
    noise = match_noise(
        denoiser(SCHEDULE), SCHEDULE, Trajectory((330, 1000)), DATA, samples=40, rings=None, shrink=True
    )
    exact = exact_powers(SCHEDULE, Trajectory((330, 1000)), 1.0, 1e-4)
    assert torch.allclose(noise.power[1].double(), exact[330], rtol=1e-4)


def test_without_shrinking_only_power_that_is_missing_is_added():
    noise = match_noise(denoiser(SCHEDULE), SCHEDULE, TRAJECTORY, DATA, eta=0.0, samples=500, rings=None)
    assert bool((noise.gain == 1).all())
    start, seen = batch_noise(7, range(2000), 0, SHAPE), []
    multistep_sample(denoiser(SCHEDULE), noise, start, 7, callback=seen.append)
    for step in seen[:-1]:
        mean, power = DATA.at(SCHEDULE, step.s)
        found = Basis().transform(step.x_s.double())
        assert float((found.var(0) / power).min()) > 1 - 5 * math.sqrt(2 / 500)
        assert float(((found.mean(0) - mean) / power.sqrt()).abs().max()) < 5 * math.sqrt(2 / 500)


def test_without_noise_and_shift_it_is_diffusers_dpm_solver():
    times = (101, 201, 301, 401, 501, 600, 700, 800, 900, 1000)
    network, x = denoiser(SCHEDULE), batch_noise(0, range(4), 0, SHAPE)
    expected = peer("DPM-Solver++", network, SCHEDULE, x, 10).x_0
    forward, previous = ForwardProcess(SCHEDULE, 0.0), None
    for t, s in Trajectory(times).descending():
        current = Prediction.of(network(x, t), x, t, *SCHEDULE.levels(t))
        x, previous = mean_of_step(forward, current, s, previous), current
    assert torch.allclose(x, expected, atol=1e-4)


def test_the_mean_is_of_second_order():
    """Twice the steps leave a quarter of the error, at eta = 0, on the probability flow from sigma 4 to 0.5."""
    schedule = Schedule.edm()
    network, start = denoiser(schedule), 4 * batch_noise(0, range(8), 0, SHAPE, torch.float64)

    def solved(steps: int) -> torch.Tensor:
        grid = torch.linspace(math.log(4.0), math.log(0.5), steps + 1, dtype=torch.float64).exp().tolist()
        x, previous, forward = start, None, ForwardProcess(schedule, 0.0)
        for t, s in pairwise(grid):
            current = Prediction.of(network(x, t), x, t, *schedule.levels(t))
            x, previous = mean_of_step(forward, current, s, previous), current
        return x

    gap = Basis().transform(start) - MEAN
    exact = Basis().inverse(MEAN + gap * ((POWER + 0.25) / (POWER + 16)).sqrt())
    errors = [float((solved(steps) - exact).square().mean().sqrt()) for steps in (16, 32, 64)]
    for coarse, fine in pairwise(errors):
        assert 3.2 < coarse / fine < 4.8


def test_the_log_probability_of_a_step_is_that_of_the_dense_gaussian():
    noise = match_noise(denoiser(SCHEDULE), SCHEDULE, TRAJECTORY, DATA, samples=64)
    start = batch_noise(3, range(5), 0, SHAPE, torch.float64)
    seen = []
    multistep_sample(denoiser(SCHEDULE), noise, start, 3, callback=seen.append)
    for step in seen[:-1]:
        place = TRAJECTORY.times.index(step.s) + 1
        frequencies = Basis().transform(torch.eye(64, dtype=torch.float64).reshape(64, *SHAPE)).flatten(1)
        covariance = frequencies @ torch.diag(noise.power[place].double().flatten()) @ frequencies.T
        dense = torch.distributions.MultivariateNormal(step.gaussian.mean.flatten(1), covariance)
        expected = dense.log_prob(step.x_s.flatten(1))
        assert torch.allclose(step.log_prob(), expected, rtol=1e-10, atol=1e-8)
    with pytest.raises(ValueError, match="zero covariance has no density"):
        seen[-1].log_prob()


def test_an_image_depends_on_its_number_alone():
    network = denoiser(SCHEDULE)
    noise = match_noise(network, SCHEDULE, TRAJECTORY, DATA, samples=32)
    start = batch_noise(5, range(6), 0, SHAPE)
    together = multistep_sample(network, noise, start, 5).x_0
    apart = multistep_sample(network, noise, start[3:5], 5, indices=[3, 4]).x_0
    assert torch.allclose(together[3:5], apart, atol=1e-5)
    assert not torch.allclose(together, multistep_sample(network, noise, start, 6).x_0, atol=1e-2)


def test_conditions_reach_the_network_row_by_row():
    def network(x_t, t, level):
        return NoisePrediction(x_t - level[:, None, None, None])

    level = torch.arange(40.0)
    noise = match_noise(network, SCHEDULE, TRAJECTORY, DATA, samples=40, condition={"level": level}, batch_size=16)
    start = batch_noise(0, range(4), 0, SHAPE)
    together = multistep_sample(network, noise, start, condition={"level": level[:4]}).x_0
    alone = multistep_sample(network, noise, start[2:3], indices=[2], condition={"level": level[2:3]}).x_0
    assert torch.allclose(together[2:3], alone, atol=1e-4)


def test_rings_average_frequencies_at_the_same_distance():
    values = torch.zeros(2, 4, 4, dtype=torch.float64)
    values[0, 0, 0], values[1, 3, 3] = 3.0, 1.0
    means = ring_means(values, 2)
    assert means.shape == values.shape
    assert means.sum().item() == pytest.approx(values.sum().item())
    assert means[0, 0, 1] == means[0, 0, 0] > 0 == means[0, 3, 3]


def test_few_steps_on_any_schedule_stay_among_its_times():
    for schedule in (Schedule.edm(0.001, 0.01), Schedule.from_betas([1e-6] * 100), Schedule.from_betas([0.002, 0.002])):
        steps = min(5, schedule.grid_size)
        times = few_step_times(schedule, steps, (1, 28, 28)).times
        assert len(times) == steps
        assert schedule.first_time <= times[0] < times[-1] <= schedule.final_time
    with pytest.raises(ValueError, match="steps = 3 is more than this schedule has times; take at most 1"):
        few_step_times(Schedule.from_betas([0.01]), 3)
    for shape in ([], [1, 0, 0], [1, 28, -28], [1.5, 2.5], [math.nan, 2, 2], 28, "a", [1, "a"]):
        for steps in (1, 5):
            with pytest.raises(ValueError, match=r"shape = .* is not a list of positive whole numbers"):
                few_step_times(SCHEDULE, steps, shape)


def test_bad_input_is_refused_by_name():
    network = denoiser(SCHEDULE)
    with pytest.raises(ValueError, match="samples = 3"):
        match_noise(network, SCHEDULE, TRAJECTORY, DATA, samples=3)
    with pytest.raises(ValueError, match="floor = 0"):
        match_noise(network, SCHEDULE, TRAJECTORY, DATA, floor=0)
    with pytest.raises(ValueError, match="one step"):
        match_noise(network, SCHEDULE, Trajectory((1000,)), DATA)
    with pytest.raises(ValueError, match="2 images are too few"):
        DataMoments.of(torch.zeros(2, 1, 8, 8))
    with pytest.raises(ValueError, match="uint8"):
        DataMoments.of(torch.zeros(200, 1, 8, 8, dtype=torch.uint8))
    good = match_noise(network, SCHEDULE, TRAJECTORY, DATA, samples=16)
    with pytest.raises(ValueError, match="float32 of shape"):
        MatchedNoise(SCHEDULE, TRAJECTORY, 1.0, good.power[1:], good.shift[1:], good.gain[1:])
    with pytest.raises(ValueError, match="positive at all others"):
        MatchedNoise(SCHEDULE, TRAJECTORY, 1.0, -good.power, good.shift, good.gain)
    with pytest.raises(ValueError, match="NaN"):
        MatchedNoise(SCHEDULE, TRAJECTORY, 1.0, good.power, good.shift * math.nan, good.gain)
    with pytest.raises(ValueError, match="gain"):
        MatchedNoise(SCHEDULE, TRAJECTORY, 1.0, good.power, good.shift, good.gain + 1)
    with pytest.raises(ValueError, match="images of shape"):
        multistep_sample(network, good, torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize("schedule", [Schedule.linear(), Schedule.cosine()], ids=["linear", "cosine"])
def test_the_noise_beside_an_extrapolated_mean_keeps_the_variance_right(schedule):
    """Gaussian data and the forward process with eta = 1: the formula of benchmarks/extrapolated_noise.py is exact."""
    lacking = runpy.run_path(str(ROOT / "benchmarks" / "extrapolated_noise.py"))["lacking"]
    data, forward = 0.7**2, ForwardProcess(schedule, 1.0)

    def power(t: float) -> float:
        return float(schedule.alpha_bar(t) * data + schedule.beta_bar(t))

    def gain(t: float) -> float:  # x0_hat = gain x_t
        return float(schedule.alpha_bar(t).sqrt()) * data / power(t)

    for u, t, s in ((900, 700, 400), (500, 300, 50), (300, 250, 10)):
        before, step = forward.bridge(u, t), forward.bridge(t, s)
        signal = float(schedule.alpha_bar(u).sqrt()) * data  # covariance of x_u and x_0
        both = float(before.clean_weight) * signal + float(before.noisy_weight) * power(u)  # of x_t and x_u
        found = lacking(schedule, u, t, s, lambda t: data * float(schedule.beta_bar(t)) / power(t))
        w, gamma, kappa = found["w"], float(step.clean_weight), float(step.noisy_weight)
        now, then = gamma * (1 + w) * gain(t) + kappa, -gamma * w * gain(u)  # the mean: now x_t + then x_u
        mean = now**2 * power(t) + then**2 * power(u) + 2 * now * then * both
        assert mean + float(step.variance) + found["variance"] == pytest.approx(power(s), rel=1e-9)
