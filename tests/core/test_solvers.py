"""The reverse SDE and ODE solvers, against the Gaussian-mixture oracle in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from adaptive_flow import adaptive_flow
from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory
from optcov.noise import batch_noise
from optcov.oracle import GaussianMixture
from optcov.sampling import sample
from optcov.solvers import euler_maruyama, gotta_go_fast, probability_flow

SCHEDULE = Schedule.vp_sde()
# Smooth enough for asymptotics at moderate step numbers, yet not Gaussian: the drift is not linear.
MIXTURE = GaussianMixture([0.3, 0.7], [[-0.5, 0.2], [0.6, -0.1]], [0.2, 0.3])
NETWORK = MIXTURE.network(SCHEDULE)
END = 0.05


def start(batch: int, seed: int = 0) -> torch.Tensor:
    return batch_noise(seed, range(batch), 0, (2,), torch.float64)


class Counting:
    """Counts the samples that pass through a network, and remembers the times asked for."""

    def __init__(self, network=NETWORK):
        self.network, self.samples, self.calls = network, 0, 0

    def __call__(self, x_t, t):
        self.samples += len(x_t)
        self.calls += 1
        return self.network(x_t, t)


def slope(steps: list[int], errors: list[float]) -> float:
    return -float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


class BrownianPath:
    """Increments of one Brownian path per sample on a fine grid, so that every step number sees the same path."""

    def __init__(self, batch: int, finest: int):
        self.finest = finest
        generator = torch.Generator().manual_seed(5)
        fine = torch.randn(finest, batch, 2, generator=generator, dtype=torch.float64)
        self.path = torch.cat([torch.zeros(1, batch, 2, dtype=torch.float64), fine.cumsum(0)])

    def __call__(self, t: float, s: float) -> torch.Tensor:
        first, last = (round((1 - time) / (1 - END) * self.finest) for time in (t, s))
        return (self.path[last] - self.path[first]) / math.sqrt(last - first)


def test_euler_maruyama_has_strong_order_one_because_its_noise_is_additive():
    x_1, path = start(32), BrownianPath(32, 1024)

    def end(steps: int) -> torch.Tensor:
        return euler_maruyama(NETWORK, SCHEDULE, x_1, steps, path, end_time=END, denoise=False).x_0

    exact, numbers = end(1024), [16, 32, 64]
    errors = [float((end(steps) - exact).norm(dim=1).mean()) for steps in numbers]
    assert 0.9 < slope(numbers, errors) < 1.15


def test_fixed_probability_flow_has_global_order_one_towards_the_adaptive_solution():
    x_1 = start(16)
    exact = adaptive_flow(NETWORK, SCHEDULE, x_1, 1e-8, end_time=END, denoise=False)
    numbers = [64, 128, 256]
    errors = [
        float((probability_flow(NETWORK, SCHEDULE, x_1, steps, end_time=END, denoise=False).x_0 - exact).norm())
        for steps in numbers
    ]
    assert 0.93 < slope(numbers, errors) < 1.07


@pytest.mark.parametrize("denoise", [False, True])
def test_probability_flow_of_a_gaussian_is_the_known_scaling(denoise):
    variance = 0.3
    network = GaussianMixture([1.0], [[0.0, 0.0]], [variance]).network(SCHEDULE)
    x_1 = start(16)
    found = adaptive_flow(network, SCHEDULE, x_1, 1e-9, denoise=denoise)

    def spread(t: float) -> float:
        return float(SCHEDULE.alpha_bar(t) * variance + SCHEDULE.beta_bar(t)) ** 0.5

    expected = x_1 * spread(1e-3) / spread(1.0)
    if denoise:
        expected = expected * float(SCHEDULE.alpha_bar(1e-3)) ** 0.5 * variance / spread(1e-3) ** 2
    assert torch.allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("denoise", [False, True])
@pytest.mark.parametrize("convention", ["exact", "score_sde"])
@pytest.mark.parametrize("solver", [euler_maruyama, probability_flow])
def test_steps_are_network_evaluations(solver, convention, denoise):
    network = Counting()
    result = solver(network, SCHEDULE, start(3), 12, convention=convention, denoise=denoise)
    assert result.evaluations.tolist() == [12] * 3
    assert network.calls == 12


def test_score_sde_convention_is_its_recursion():
    """Times linspace(1, 1e-3, K), constant step 1/K, and the mean of the last step."""
    x, K, noises = start(5), 7, {}

    def noise(t, s):
        noises[t] = torch.full((5, 2), 1.0 + t, dtype=torch.float64)
        return noises[t]

    result = euler_maruyama(NETWORK, SCHEDULE, x, K, noise, convention="score_sde").x_0
    for i, t in enumerate(np.linspace(1, 1e-3, K)):
        beta, score = 0.1 + t * 19.9, -NETWORK(x, t).noise / SCHEDULE.beta_bar(t).sqrt()
        drift = -0.5 * beta * x - beta * score
        x = x - drift / K
        if i < K - 1:
            x = x + math.sqrt(beta / K) * (1.0 + t)
    assert torch.allclose(result, x, rtol=1e-12)
    assert len(noises) == K - 1


@pytest.mark.parametrize("convention", ["exact", "score_sde"])
@pytest.mark.parametrize("solver", [euler_maruyama, probability_flow])
def test_the_last_image_is_clipped_if_it_is_a_mean(solver, convention):
    options = {"convention": convention, "data_range": (-0.1, 0.1)}
    plain = solver(NETWORK, SCHEDULE, start(20), 4, convention=convention).x_0
    assert torch.equal(solver(NETWORK, SCHEDULE, start(20), 4, **options).x_0, plain.clamp(-0.1, 0.1))
    noisy = solver(NETWORK, SCHEDULE, start(20), 4, denoise=False, **options).x_0
    assert float(noisy.abs().max()) > 0.1


def moments_within(x: torch.Tensor, bias: float) -> None:
    """Mean and covariance of the data within 4 standard errors (level 6e-5 each) plus a stated bias."""
    count = len(x)
    data = MIXTURE.sample(200_000, seed=9)
    assert torch.all((x.mean(0) - data.mean(0)).abs() < 4 * data.std(0) / count**0.5 + bias)
    spread = data.T.cov()
    centred = data - data.mean(0)
    standard_error = (torch.einsum("bi,bj->bij", centred, centred).var(0) / count).sqrt()
    assert torch.all((x.T.cov() - spread).abs() < 4 * standard_error + bias)


def fast_noise(batch: int):
    """Step noise from one generator: seeds per image, which the moments do not need, cost more than the oracle."""
    generator = torch.Generator().manual_seed(1)
    return lambda t, s: torch.randn(batch, 2, generator=generator, dtype=torch.float64)


def test_euler_maruyama_draws_the_data_distribution():
    moments_within(euler_maruyama(NETWORK, SCHEDULE, start(2000), 150, fast_noise(2000)).x_0, bias=0.01)


def test_probability_flow_draws_the_data_distribution():
    moments_within(probability_flow(NETWORK, SCHEDULE, start(2000), 150).x_0, bias=0.01)


def test_gotta_go_fast_draws_the_data_distribution():
    """In 64 dimensions, where its bias by rejection (see the module) is 3 % of the variance."""
    d, count, weights = 64, 200, torch.tensor([0.3, 0.7])
    data = GaussianMixture(weights, [[-0.5] * d, [0.5] * d], [0.2, 0.3])
    x_1 = batch_noise(0, range(count), 0, (d,), torch.float64)
    x_0 = gotta_go_fast(data.network(SCHEDULE), SCHEDULE, x_1, relative_tolerance=0.2, seed=1).x_0
    right = x_0.mean(1) > 0  # 7 standard deviations from either side
    assert float(right.double().mean()) == pytest.approx(0.7, abs=4 * (0.21 / count) ** 0.5)  # level 6e-5
    for where, mean, variance in ((~right, -0.5, 0.2), (right, 0.5, 0.3)):
        pixels = x_0[where].flatten()
        assert float(pixels.mean()) == pytest.approx(mean, abs=4 * (variance / len(pixels)) ** 0.5 + 0.01)
        assert float(pixels.var()) == pytest.approx(variance, rel=4 * (2 / len(pixels)) ** 0.5 + 0.03)


def test_gotta_go_fast_counts_every_evaluation_and_asks_for_no_finished_sample():
    network = Counting()
    result = gotta_go_fast(network, SCHEDULE, start(20), relative_tolerance=0.1)
    assert network.samples == int(result.evaluations.sum())
    assert len(result.evaluations.unique()) > 1
    assert torch.all(result.evaluations % 2 == 1)  # two a trial, and the last denoising one


def test_gotta_go_fast_counts_rejected_trials():
    """A first step that is far too long is rejected; it costs two evaluations, and is not what goes on."""
    network = Counting()
    fast = gotta_go_fast(network, SCHEDULE, start(5), first_step=0.9, relative_tolerance=0.05)
    assert network.samples == int(fast.evaluations.sum())
    times = []

    def watched(x_t, t):
        times.append(t.clone() if isinstance(t, torch.Tensor) else t)
        return NETWORK(x_t, t)

    gotta_go_fast(watched, SCHEDULE, start(1), first_step=0.9, relative_tolerance=0.05)
    assert float(times[1]) == pytest.approx(0.1)
    assert float(times[2]) == 1.0  # the second trial starts where the rejected one did


def test_gotta_go_fast_tolerance_sets_the_cost():
    costs = [
        int(gotta_go_fast(NETWORK, SCHEDULE, start(5), relative_tolerance=tolerance).evaluations.sum())
        for tolerance in (0.5, 0.2, 0.05)
    ]
    assert costs[0] < costs[1] < costs[2]


def test_gotta_go_fast_is_the_algorithm():
    """One sample, followed step by step by scalar arithmetic."""
    x = start(1, seed=3)
    result = gotta_go_fast(NETWORK, SCHEDULE, x, 0.05, 0.0078, seed=7, denoise=False)
    t, h, previous, trial = 1.0, 0.01, x, 0

    def move(x, point, t, h, z):
        beta = 0.1 + 19.9 * t
        score = -NETWORK(point, t).noise / SCHEDULE.beta_bar(t).sqrt()
        return x + h * (beta * point / 2 + beta * score) + math.sqrt(beta * h) * z

    while t > 1e-3 + 1e-12:
        trial += 1
        z = batch_noise(7, [0], trial, (2,), torch.float64)
        first = move(x, x, t, h, z)
        # the drift of the second step is taken at x', but the step starts from x
        beta = 0.1 + 19.9 * (t - h)
        score = -NETWORK(first, t - h).noise / SCHEDULE.beta_bar(t - h).sqrt()
        second = x + h * (beta * first / 2 + beta * score) + math.sqrt(beta * h) * z
        improved = (first + second) / 2
        delta = torch.maximum(torch.tensor(0.0078), 0.05 * torch.maximum(first.abs(), previous.abs()))
        error = float(((first - improved) / delta).square().mean().sqrt())
        if error <= 1:
            x, t, previous = improved, t - h, first
        h = min(t - 1e-3, 0.9 * h * error**-0.9)
    assert result.evaluations.tolist() == [2 * trial]
    assert torch.allclose(result.x_0, x, atol=1e-9)


def test_noise_of_an_image_does_not_depend_on_its_batch():
    x_1 = start(7)
    whole = euler_maruyama(NETWORK, SCHEDULE, x_1, 10, seed=4).x_0
    part = euler_maruyama(NETWORK, SCHEDULE, x_1[2:5], 10, seed=4, indices=[2, 3, 4]).x_0
    assert torch.allclose(whole[2:5], part, atol=1e-12)


def test_gotta_go_fast_of_an_image_does_not_depend_on_its_batch():
    x_1 = start(7)
    whole = gotta_go_fast(NETWORK, SCHEDULE, x_1, seed=4)
    part = gotta_go_fast(NETWORK, SCHEDULE, x_1[2:5], seed=4, indices=[2, 3, 4])
    assert torch.equal(whole.evaluations[2:5], part.evaluations)
    assert torch.allclose(whole.x_0[2:5], part.x_0, atol=1e-9)


@pytest.mark.parametrize("solver", [euler_maruyama, probability_flow, gotta_go_fast])
def test_half_precision_noise_is_solved_in_float32(solver):
    x_0 = solver(NETWORK, SCHEDULE, start(2).bfloat16(), *([] if solver is gotta_go_fast else [5])).x_0
    assert x_0.dtype == torch.float32
    assert x_0.isfinite().all()


def failing(x_t, t):
    noise = NETWORK(x_t, t).noise
    time = torch.as_tensor(t).expand(len(x_t))
    noise[(time < 0.5) & (x_t[:, 0] > 0.3)] = math.nan
    return NoisePrediction(noise)


@pytest.mark.parametrize("solver", [euler_maruyama, probability_flow])
def test_a_bad_value_stops_with_step_time_and_samples(solver):
    with pytest.raises(ValueError, match=r"NaN or infinity: first at step \d+ \(time 0\.\d*\), in samples \[\d"):
        solver(failing, SCHEDULE, start(8), 20)


def test_a_bad_value_stops_an_adaptive_solver():
    with pytest.raises(ValueError, match="NaN or infinity: first at step"):
        gotta_go_fast(failing, SCHEDULE, start(8))


def test_fixed_steps_never_wait_for_the_device(monkeypatch):
    """In the loop no tensor is read by the host: reading is counted from the first network call to the last."""
    reads = []
    for name in ("__bool__", "__float__", "__int__", "item", "tolist", "cpu", "nonzero"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name, **kwargs):
            if self.ndim and self.shape[0] == 6:
                reads.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    seen = []

    def network(x_t, t):
        seen.append(list(reads))
        return NoisePrediction(x_t * 0.9, {"npr": x_t.square()})

    def sampler(network, schedule, x_1, steps):
        process = ReverseProcess(network, ForwardProcess(schedule), "npr")
        sample(process, Trajectory.even(schedule, steps), start=x_1, noise_cap=1.0)

    for solver in (euler_maruyama, probability_flow, sampler):
        seen.clear(), reads.clear()
        solver(network, SCHEDULE, start(6), 5)
        assert seen == [[]] * 5, solver


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: euler_maruyama(NETWORK, Schedule.linear(), start(2), 5), "needs Schedule.vp_sde"),
        (lambda: euler_maruyama(NETWORK, SCHEDULE, start(2), 1), "steps = 1 is not an integer of at least 2"),
        (
            lambda: euler_maruyama(NETWORK, SCHEDULE, start(2), 5, convention="x"),
            "convention = 'x' is not one of",
        ),
        (lambda: euler_maruyama(NETWORK, SCHEDULE, start(2), 5, end_time=1.5), "end_time = 1.5 is outside"),
        (
            lambda: euler_maruyama(NETWORK, SCHEDULE, torch.zeros(2), 5),
            "start must be a floating-point tensor",
        ),
        (lambda: euler_maruyama(NETWORK, SCHEDULE, start(2), 5, indices=[1]), "1 image numbers for a batch of 2"),
        (
            lambda: euler_maruyama(NETWORK, SCHEDULE, start(2), 5, lambda t, s: torch.zeros(1)),
            "supplied noise",
        ),
        (lambda: euler_maruyama(NETWORK, SCHEDULE, start(2)[:0], 5), "that is not empty"),
        (lambda: gotta_go_fast(NETWORK, SCHEDULE, start(2), -1.0), "tolerances must be positive"),
        (
            lambda: gotta_go_fast(NETWORK, SCHEDULE, start(2), first_step=0.0),
            "first_step = 0.0 must be positive",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("covariance", ["analytic", "npr", "sn"])
def test_optimal_covariances_work_in_continuous_time(covariance):
    """A-DPM, NPR-DPM and SN-DPM: with the oracle's heads, 100 steps draw the data distribution."""

    def mean_square_noise(t):
        x_t = ForwardProcess(SCHEDULE).diffuse(MIXTURE.sample(500, seed=1), float(t), start(500, seed=8))
        return NETWORK(x_t, float(t)).noise.square().mean()

    options = {"mean_square_noise": mean_square_noise} if covariance == "analytic" else {}
    process = ReverseProcess(NETWORK, ForwardProcess(SCHEDULE), covariance, data_range=None, **options)
    x_0 = sample(process, Trajectory.even(SCHEDULE, 100), start=start(2000), noise=fast_noise(2000), last_step="draw")
    moments_within(x_0, bias=0.01)
