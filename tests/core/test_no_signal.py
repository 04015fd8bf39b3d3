"""Where no signal is left (flow matching at t = 1, zero terminal SNR at N) every covariance is finite and right."""

from __future__ import annotations

import pytest
import torch

from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, cost_table, oracle, sample
from optcov.covariances import BothUnits, Covariance, Example, LearnedRange, number_at

ZERO_TERMINAL = Schedule.from_betas(torch.cat([Schedule.linear().betas[:-1], torch.ones(1, dtype=torch.float64)]))
BLIND = [Schedule.flow(), ZERO_TERMINAL]
DATA = oracle.GaussianMixture(
    [0.4, 0.6], [[-0.5, 0.2], [0.6, 0.1]], [[[0.3, 0.1], [0.1, 0.2]], [[0.1, -0.05], [-0.05, 0.4]]]
)
ONE = oracle.GaussianMixture([1.0], [[0.0, 0.0]], [0.3])  # whose numbers are the same at every x_t


def points(count=6):
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def exact_numbers(schedule, velocity=True):
    """What an exact network has for ONE, in closed form: Var[eps | x_t] = a^2 S / (a^2 S + b^2)."""

    def variance(t, moments=ONE.noise_moments):
        t = torch.as_tensor(t)
        return moments(torch.zeros(max(1, t.numel()), 2), schedule, t).covariance[:, 0, 0].reshape(t.shape)

    def in_velocity(t):
        return variance(t, ONE.velocity_moments)

    def per_time(number):
        return number(torch.arange(schedule.grid_size + 1).clamp(min=1)) if schedule.discrete else number

    known = {"mean_square_noise": lambda t: 1 - variance(t), "mean_square_residual": variance}
    return {
        name: BothUnits(per_time(number), per_time(in_velocity)) if velocity else per_time(number)
        for name, number in known.items()
    }


def white(covariance, schedule):
    """Spectra without correlations: then a correlated covariance is its diagonal, and "spectral" is isotropic."""
    if Covariance.registry[covariance].spectrum is None:
        return {}
    variance = exact_numbers(schedule)["mean_square_residual"].velocity if covariance == "spectral" else None

    def powers(t):
        level = 1.0 if variance is None else float(number_at(variance, t).flatten()[0])
        return torch.full((2,), level, dtype=torch.float64)

    return {"spectrum": powers}


@pytest.mark.parametrize("kind", ["v_prediction", "flow_prediction", "sample"])
@pytest.mark.parametrize("schedule", BLIND, ids=["flow", "zero terminal SNR"])
@pytest.mark.parametrize("covariance", [name for name, kind in Covariance.registry.items() if kind.head])
def test_heads_give_the_exact_step_from_pure_noise(covariance, schedule, kind):
    t, s = schedule.final_time, schedule.grid([400])[0]
    forward = ForwardProcess(schedule)
    process = ReverseProcess(
        DATA.network(schedule, prediction_type=kind), forward, covariance, None, **white(covariance, schedule)
    )
    step, exact = process.step(points(), t, s), DATA.reverse_moments(points(), forward, t, s)
    torch.testing.assert_close(step.mean, exact.mean, rtol=1e-9, atol=1e-9)
    assert bool(step.variance.isfinite().all())
    if covariance != "range":  # which is optimal for single steps of the full process alone
        torch.testing.assert_close(step.variance, exact.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("velocity", [True, False], ids=["both units", "noise units alone"])
@pytest.mark.parametrize("schedule", BLIND, ids=["flow", "zero terminal SNR"])
@pytest.mark.parametrize("covariance", ["analytic", "npr_isotropic"])
def test_numbers_per_time_give_the_variance_of_the_data_from_pure_noise(covariance, schedule, velocity):
    network = ONE.network(schedule, prediction_type="v_prediction")
    numbers = exact_numbers(schedule, velocity)
    process = ReverseProcess(network, ForwardProcess(schedule), covariance, None, **numbers)
    variance = process.posterior(points(), schedule.final_time).variance
    # without velocity units it is that of the time before, which differs by alpha_bar / beta_bar times the variance
    assert variance.flatten().tolist() == pytest.approx([0.3], rel=1e-9 if velocity else 1e-4)


@pytest.mark.parametrize("covariance", ["analytic", "npr_isotropic"])
def test_a_batch_may_mix_times_with_and_without_signal(covariance):
    schedule, x = Schedule.flow(), points()
    t = torch.tensor([0.2, 1.0, 0.7, 1.0, 0.999, 0.5], dtype=torch.float64)
    network = ONE.network(schedule, prediction_type="flow_prediction")
    process = ReverseProcess(network, ForwardProcess(schedule), covariance, None, **exact_numbers(schedule))
    exact = ONE.clean_moments(x, schedule, t).covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(process.posterior(x, t).variance.expand_as(exact), exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize("covariance", list(Covariance.registry))
@pytest.mark.parametrize("schedule", BLIND, ids=["flow", "zero terminal SNR"])
def test_every_covariance_samples_from_pure_noise(schedule, covariance):
    network = ONE.network(schedule, prediction_type="v_prediction")
    numbers = {**exact_numbers(schedule, False), **white(covariance, schedule)}
    process = ReverseProcess(network, ForwardProcess(schedule), covariance, None, **numbers)
    drawn = sample(process, Trajectory.even(schedule, 8), (3000, 2))
    assert bool(drawn.isfinite().all())
    if covariance not in ("beta_tilde", "beta", "range"):
        assert float(drawn.var()) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("schedule", BLIND, ids=["flow", "zero terminal SNR"])
def test_a_sweep_prices_numbers_that_it_measures_from_pure_noise(schedule):
    network = ONE.network(schedule, prediction_type="v_prediction")
    process = ReverseProcess(network, ForwardProcess(schedule), "npr", None)
    times = schedule.grid([1, 250, 500, 750, 999, 1000])
    table = cost_table(process, ONE.sample(400), ["npr", "analytic", "npr_isotropic"], times=times)
    trajectory = Trajectory([times[0], times[2], times[-1]])
    found = {name: float(table.group_bits_per_dim(name, trajectory).mean()) for name in table.covariances}
    assert found["npr_isotropic"] == pytest.approx(found["npr"], abs=0.01)
    assert 1 < found["analytic"] < 100  # 1 - Gamma_t is a small difference there, known badly from 400 points


@pytest.mark.parametrize("schedule", BLIND, ids=["flow", "zero terminal SNR"])
def test_the_range_is_fitted_on_the_second_moment_of_a_step_from_pure_noise(schedule):
    forward, t = ForwardProcess(schedule), schedule.final_time
    process = ReverseProcess(DATA.network(schedule, prediction_type="v_prediction"), forward, "npr", None)
    x_0, noise, times = DATA.sample(6), points(), torch.full((6,), t)
    prediction = process.predict(forward.diffuse(x_0, t, noise), t)
    found = LearnedRange.regression(Example(prediction, x_0, noise, times, forward), "noise")
    bridge = forward.bridge(t, schedule.grid([999])[0])
    expected = bridge.variance + bridge.clean_weight**2 * (x_0 - prediction.clean).square()
    torch.testing.assert_close(found.target, expected)
    assert bool(found.log_estimate(torch.zeros_like(x_0)).isfinite().all())


def test_diffusers_zero_terminal_snr_is_a_schedule_of_velocity_networks():
    from diffusers import DDPMScheduler

    theirs = DDPMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction")
    schedule = Schedule.from_diffusers(theirs)
    ours = schedule.alpha_bar(torch.arange(1, 1001)).float()
    torch.testing.assert_close(ours, theirs.alphas_cumprod, rtol=1e-3, atol=1e-6)
    assert float(schedule.alpha_bar(1000)) == 0
    assert schedule.last_time_with_signal == 999
