"""Schedules of any kind: flow matching, EDM and a new one, by the same formulas and the same questions."""

from __future__ import annotations

import math

import pytest
import torch

from adaptive_flow import adaptive_flow
from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, oracle, sample
from optcov.bundle import BundleError
from optcov.bundle.schedules import build_schedule, schedule_spec
from optcov.covariances import Covariance, find_covariance
from optcov.fitting import time_grid
from optcov.fitting.batches import NoiseLevels, draw_times
from optcov.gaussian import Full
from optcov.likelihood import ode_likelihood
from optcov.methods import METHODS, draw
from optcov.networks.times import TimeArgument
from optcov.prediction import Prediction
from optcov.solvers import euler_maruyama, gotta_go_fast, probability_flow
from small_bundles import small_bundle

KINDS = [Schedule.vp_sde(), Schedule.ve_sde(), Schedule.edm(), Schedule.flow()]
EVERY = [Schedule.linear(), Schedule.cosine(), *KINDS]
DATA = oracle.GaussianMixture(
    [0.4, 0.6], [[-0.5, 0.2], [0.6, 0.1]], [[[0.3, 0.1], [0.1, 0.2]], [[0.1, -0.05], [-0.05, 0.4]]]
)
ONE = oracle.GaussianMixture([1.0], [[0.1, -0.2]], [[0.3, 0.5]])


def velocity_network(data, schedule, kind="flow_prediction"):
    """A perfect network that predicts a velocity, with heads in velocity units: defined where no signal is left."""

    def network(x_t, t):
        signal, spread = schedule.levels(t)
        clean, noise = (moments(x_t, schedule, t) for moments in (data.clean_moments, data.noise_moments))
        norm = schedule.unit_data_std(t)
        velocity = (signal * noise.mean - spread * clean.mean) / norm
        # x_0 = (a x_t - b n v) / n^2
        variance = clean.covariance.diagonal(dim1=-2, dim2=-1) * (norm / spread) ** 2
        output = noise.mean - clean.mean if kind == "flow_prediction" else velocity
        heads = {"npr": variance, "sn": variance + velocity.square()}
        return Prediction(x_t, t, output, kind, signal, spread, heads, {"npr": "velocity", "sn": "velocity"})

    return network


def points(count=5, seed=0):
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# levels


def test_flow_mixes_data_and_noise_linearly():
    flow = Schedule.flow()
    for t in (1e-6, 0.25, 0.5, 0.999):
        signal, spread = flow.levels(t)
        assert (float(signal), float(spread)) == (pytest.approx(1 - t, rel=1e-14), pytest.approx(t, rel=1e-14))
        assert float(flow.log_snr(t)) == pytest.approx(2 * math.log((1 - t) / t), rel=1e-12)
    assert [float(level) for level in flow.levels(1)] == [0.0, 1.0]
    assert float(flow.log_snr(1)) == -math.inf
    assert float(flow.log_snr(0)) == math.inf


def test_the_time_of_edm_is_its_noise_level():
    edm = Schedule.edm()
    for t in (0.002, 1.0, 80.0):
        assert [float(level) for level in edm.levels(t)] == [1.0, pytest.approx(t, rel=1e-14)]
    assert (edm.first_time, edm.final_time) == (0.002, 80.0)
    with pytest.raises(ValueError, match=r"time 81 is outside this schedule; use real times from 0 to 80"):
        edm.levels(81.0)


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_a_time_is_found_again_by_its_log_snr(schedule):
    times = torch.tensor(schedule.grid([1, 2, 300, 700, 999]), dtype=torch.float64)
    found = schedule.time_at(schedule.log_snr(times))
    torch.testing.assert_close(found, times, rtol=1e-9, atol=0)
    assert torch.equal(schedule.nearest(found).double(), times) or not schedule.discrete
    assert schedule.number(float(times[2])) == pytest.approx(300)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("s", [0.0, 0.3, 0.999])
def test_the_bridge_from_pure_noise_is_finite(eta, s):
    """At t = 1 of a flow c = 1: kappa = sqrt(1 - eta^2) times the noise level of s, and x_0 weighs as at s."""
    bridge = ForwardProcess(Schedule.flow(), eta).bridge(1.0, s)
    assert float(bridge.variance) == pytest.approx(eta**2 * s**2, abs=1e-15)
    assert float(bridge.noisy_weight) == pytest.approx(s * math.sqrt(1 - eta**2), abs=1e-15)
    assert float(bridge.clean_weight) == pytest.approx(1 - s, abs=1e-15)


@pytest.mark.parametrize("schedule", KINDS, ids=repr)
def test_level_rates_are_the_derivatives_of_the_levels(schedule):
    t, h = torch.tensor([0.2, 0.6], dtype=torch.float64), 1e-6
    rates = schedule.level_rates(t)
    for number, rate in enumerate(rates):
        difference = (schedule.levels(t + h)[number] - schedule.levels(t - h)[number]) / (2 * h)
        torch.testing.assert_close(rate, difference, rtol=1e-7, atol=1e-7)
        assert float(schedule.level_rates(0.2)[number]) == pytest.approx(float(rate[0]), rel=1e-12)
    with torch.inference_mode():
        assert torch.equal(schedule.level_rates(t)[1], rates[1])


# one trajectory in log-SNR, written in several schedules

SHARED = [kind.name for kind in Covariance.registry.values() if kind.head and kind.has_posterior]


@pytest.mark.parametrize("eta", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("covariance", [*SHARED, "beta_tilde", "analytic", "npr_isotropic"])
def test_the_same_noise_levels_give_the_same_steps_in_every_schedule(covariance, eta):
    """x_t / sqrt(alpha_bar_t) and its steps do not depend on how the levels are written: to 1e-10 after rescaling."""
    levels = torch.tensor([6.0, 2.0, 0.0, -3.0, -6.0], dtype=torch.float64)
    x, found = points(), {}
    for schedule in (Schedule.vp_sde(), Schedule.edm(), Schedule.flow()):
        times = schedule.time_at(levels).tolist()
        numbers = {
            name: lambda t, schedule=schedule: 0.5 * torch.sigmoid(schedule.log_snr(t))
            for name in ("mean_square_noise", "mean_square_residual")
        }
        network, forward = DATA.network(schedule, error=0.1), ForwardProcess(schedule, eta)
        if find_covariance(covariance).spectrum is not None:
            numbers["spectrum"] = torch.linspace(2.0, 0.5, x[0].numel(), dtype=torch.float64).reshape(x.shape[1:])
        process = ReverseProcess(network, forward, covariance, None, **numbers)
        for number, t in enumerate(times):
            for s in [0.0, *times[:number]]:
                signal_t, signal_s = schedule.levels(t)[0], schedule.levels(s)[0]
                step = process.step(signal_t * x, t, s)
                shape = step.covariance
                spread = shape.matrix.flatten(1) if isinstance(shape, Full) else shape.diagonal(x).expand_as(x)
                parts = [step.mean / signal_s, spread / signal_s**2]
                key = (number, times.index(s) if s else -1)
                found.setdefault(key, []).append(torch.cat(parts, 1))
    assert len(found) == 15
    for values in found.values():
        for other in values[1:]:
            torch.testing.assert_close(other, values[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("covariance", ["npr", "sn"])
@pytest.mark.parametrize("kind", ["flow_prediction", "v_prediction"])
@pytest.mark.parametrize("schedule", [Schedule.flow(), Schedule.vp_sde(), Schedule.edm()], ids=repr)
def test_heads_in_velocity_units_give_the_exact_step_at_every_time(schedule, kind, covariance):
    """Also from t = 1 of a flow, where no signal is left."""
    forward = ForwardProcess(schedule)
    process = ReverseProcess(velocity_network(DATA, schedule, kind), forward, covariance, None)
    final = schedule.final_time
    for t, s in ((final, 0.5 * final), (final, 0.0), (0.5 * final, 0.1 * final), (0.001 * final, 0.0)):
        x_t = schedule.unit_data_std(t) * points()
        step, exact = process.step(x_t, t, s), DATA.reverse_moments(x_t, forward, t, s)
        torch.testing.assert_close(step.mean, exact.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(step.variance, exact.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-7, atol=1e-9)


def test_predicted_noise_says_nothing_where_no_signal_is_left():
    flow = Schedule.flow()
    process = ReverseProcess(lambda x, t: oracle.NoisePrediction(x), ForwardProcess(flow), "beta_tilde", None)
    with pytest.raises(ValueError, match=r"at time 1.0 no signal is left.* predicts x_0 or a velocity"):
        process.step(points(), 1.0, 0.5)


@pytest.mark.parametrize("schedule", [Schedule.flow(), Schedule.edm(), Schedule.ve_sde()], ids=repr)
def test_samples_of_a_gaussian_have_its_moments(schedule):
    """The optimal covariance makes each step exact for one Gaussian; EDM and VE start from a prior that is near it.

    4,000 samples: mean and variance at 4.5 standard errors.
    """
    trajectory = Trajectory.karras(schedule, 12)
    process = ReverseProcess(velocity_network(ONE, schedule), ForwardProcess(schedule), "npr", None)
    found = sample(process, trajectory, (4000, 2), seed=3, dtype=torch.float64, last_step="draw")
    assert bool(((found.mean(0) - ONE.means[0]).abs() < 4.5 * (torch.tensor([0.3, 0.5]) / 4000).sqrt()).all())
    expected = torch.tensor([0.3, 0.5], dtype=torch.float64)
    assert bool(((found.var(0) - expected).abs() < 4.5 * expected * math.sqrt(2 / 4000)).all())


# trajectories


def test_karras_times_are_edms_formula():
    """sigma_i = (sigma_max^(1/rho) + i/(K-1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho, Karras et al. Eq. 5."""
    for K, rho in ((18, 7.0), (5, 3.0)):
        ends = 80.0 ** (1 / rho), 0.002 ** (1 / rho)
        expected = [(ends[0] + i / (K - 1) * (ends[1] - ends[0])) ** rho for i in range(K)]
        found = Trajectory.karras(Schedule.edm(), K, rho).times
        assert found == pytest.approx(expected[::-1], rel=1e-12)


def test_karras_times_have_the_same_noise_levels_in_real_times_of_any_kind():
    vp = Schedule.vp_sde()
    sigmas = torch.exp(-vp.log_snr(torch.tensor(Trajectory.karras(vp, 9).times, dtype=torch.float64)) / 2)
    steps = (sigmas ** (1 / 7)).diff()
    torch.testing.assert_close(steps, steps[:1].expand_as(steps), rtol=1e-8, atol=0)


@pytest.mark.parametrize("K", [2, 10, 50, 1000])
def test_karras_times_of_a_discrete_schedule_are_distinct_whole_times(K):
    times = Trajectory.karras(Schedule.linear(), K).times
    assert len(times) == K
    assert (times[0], times[-1]) == (1, 1000)
    assert all(isinstance(t, int) for t in times)


def test_karras_times_of_a_flow_end_where_no_signal_is_left():
    flow = Schedule.flow()
    times = Trajectory.karras(flow, 10).times
    assert times[-1] == 1.0
    assert all(0 < t < 1 for t in times[:-1])
    assert flow.last_time_with_signal == 0.999
    for schedule in (Schedule.linear(), Schedule.vp_sde(), Schedule.edm()):
        assert schedule.last_time_with_signal == schedule.final_time


@pytest.mark.parametrize(("K", "rho"), [(1, 7.0), (2.5, 7.0), (5, 0.0), (5, float("nan"))])
def test_karras_refuses_what_makes_no_times(K, rho):
    with pytest.raises(ValueError, match=r"K = |rho = "):
        Trajectory.karras(Schedule.edm(), K, rho)


def test_a_bundle_steps_along_karras_times():
    bundle = small_bundle(Schedule.linear())
    assert bundle.trajectory(5, "karras") == Trajectory.karras(Schedule.linear(), 5)
    assert bundle.sample(1, method="DDIM", steps=3, trajectory="karras", progress=False).shape == (1, 1, 8, 8)


# questions


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_training_times_and_grids_fit_the_schedule(schedule):
    generator = torch.Generator().manual_seed(0)
    for levels in (None, NoiseLevels()):
        times = schedule.check_times(draw_times(schedule, 200, generator, levels))
        assert float(times.min()) >= schedule.first_time
        assert float(times.max()) <= schedule.final_time
    grid = time_grid(schedule, 20)
    assert bool((grid.diff() > 0).all())
    assert (float(grid[0]), float(grid[-1])) == (schedule.first_time, schedule.final_time)
    assert len(schedule.full_grid()) == schedule.grid_size == 1000
    assert len(Trajectory.even(schedule, 10)) == len(Trajectory.quadratic(schedule, 10)) == 10


def test_a_network_is_told_its_time_as_its_schedule_has_it():
    told = {"linear": (Schedule.linear(500), 250, 500.0), "vp_sde": (Schedule.vp_sde(), 0.5, 499.5)}
    told |= {"flow": (Schedule.flow(), 0.5, 500.0), "edm": (Schedule.edm(), 0.5, 0.5)}
    for schedule, t, argument in told.values():
        assert float(TimeArgument.default(schedule)(t)) == argument


def test_a_schedule_on_its_grid_needs_to_preserve_variance():
    assert Schedule.vp_sde().on_grid(10).grid_size == 10
    with pytest.raises(ValueError, match=r"EDMSchedule.* does not preserve variance"):
        Schedule.edm().on_grid()
    with pytest.raises(ValueError, match="has no real times"):
        Schedule.linear().on_grid()


# the probability flow and the reverse SDE


@pytest.mark.parametrize("schedule", KINDS, ids=repr)
def test_the_ode_likelihood_of_a_gaussian_is_its_density_in_every_schedule(schedule):
    """A diagonal Jacobian makes Hutchinson exact: within 2e-3 nats per dimension, on average over 64 points."""
    x_0 = ONE.sample(64, seed=1)
    found = ode_likelihood(_differentiable(ONE, schedule), schedule, x_0, data_range=None)
    gap = (found.log_density - ONE.log_density(x_0, schedule, 0)) / 2
    assert abs(float(gap.mean())) < 2e-3
    assert float(gap.abs().max()) < 2e-2


def _differentiable(data, schedule):
    return velocity_network(data, schedule) if schedule.name == "flow" else data.network(schedule)


@pytest.mark.parametrize("schedule", KINDS, ids=repr)
def test_the_probability_flow_carries_the_prior_to_the_data_in_every_schedule(schedule):
    """One Gaussian is carried linearly: end = mean + std of the data times the standardised start, to 2e-3."""
    start = schedule.unit_data_std(schedule.final_time) * points(50)
    end_time = 0.01 if schedule.name == "edm" else None
    found = adaptive_flow(velocity_network(ONE, schedule), schedule, start, end_time=end_time, denoise=False)
    mean, variance = ONE.means[0], torch.tensor([0.3, 0.5], dtype=torch.float64)
    final = schedule.final_time
    a, b2 = schedule.levels(final)[0], schedule.beta_bar(final)
    standard = (start - a * mean) / (a.square() * variance + b2).sqrt()
    t = end_time or schedule.small_step
    a, b2 = schedule.levels(t)[0], schedule.beta_bar(t)
    expected = a * mean + (a.square() * variance + b2).sqrt() * standard
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


def test_euler_steps_of_the_probability_flow_work_on_a_flow():
    """A rectified flow of one Gaussian is curved, so that steps cost accuracy: 200 of them leave below 0.02."""
    flow = Schedule.flow()
    network, start = velocity_network(ONE, flow), points(50)
    exact = adaptive_flow(network, flow, start)
    errors = [float((probability_flow(network, flow, start, K).x_0 - exact).abs().max()) for K in (20, 200)]
    assert errors[1] < errors[0] / 5
    assert errors[1] < 0.02


def test_methods_in_continuous_time_run_on_a_flow():
    flow = Schedule.flow()
    network = velocity_network(ONE, flow)
    for name in ("NPR-DPM", "SN-DPM", "Probability flow", "Ancestral sampling"):
        found = draw(METHODS[name], network, flow, 10, (2,), range(4), data_range=None).x_0
        assert bool(found.isfinite().all()), name


@pytest.mark.parametrize("schedule", [Schedule.linear(), Schedule.edm(), Schedule.flow()], ids=repr)
@pytest.mark.parametrize(
    "solver",
    [lambda n, s, x: euler_maruyama(n, s, x, 5), lambda n, s, x: gotta_go_fast(n, s, x)],
    ids=["euler_maruyama", "gotta_go_fast"],
)
def test_solvers_of_the_vp_sde_refuse_other_schedules_by_name(solver, schedule):
    with pytest.raises(ValueError, match=rf"needs Schedule.vp_sde\(\), got {type(schedule).__name__}"):
        solver(ONE.network(schedule), schedule, points())


# a new schedule is one class


@pytest.fixture
def cubic():
    class Cubic(Schedule):
        """alpha_bar = (1 - t)^3, variance-preserving, up to `last`."""

        name = "cubic"

        def __init__(self, last: float = 0.99):
            self.final_time = last

        def log_alpha_bar(self, t):
            return 3 * torch.log1p(-self.check_times(t))

        def log_beta_bar(self, t):
            return torch.log(-torch.expm1(self.log_alpha_bar(t)))

        def time_at(self, log_snr):
            return -torch.expm1(-torch.nn.functional.softplus(-log_snr) / 3)

        def settings(self):
            return {"last": self.final_time}

    yield Cubic
    Schedule.registry.pop("cubic")


def test_a_new_schedule_is_one_class(cubic):
    schedule = cubic(0.99)
    process = ReverseProcess(ONE.network(schedule), ForwardProcess(schedule), "npr", None)
    found = sample(process, Trajectory.karras(schedule, 10), (4000, 2), last_step="draw", dtype=torch.float64)
    expected = torch.tensor([0.3, 0.5], dtype=torch.float64)
    assert bool(((found.var(0) - expected).abs() < 4.5 * expected * math.sqrt(2 / 4000)).all())
    x_0 = ONE.sample(16)
    scored = ode_likelihood(ONE.network(schedule), schedule, x_0, None).log_density
    torch.testing.assert_close(scored, ONE.log_density(x_0, schedule, 0), rtol=0, atol=2e-2)
    again = build_schedule(schedule_spec(schedule))
    assert repr(again) == repr(schedule) == "Cubic(last=0.99)"
    assert again.digest() == schedule.digest() != Schedule.vp_sde().digest()
    with pytest.raises(BundleError, match="has no setting 'first'"):
        build_schedule({"kind": "cubic", "first": 0.1})
