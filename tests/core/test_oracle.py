from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optcov import ForwardProcess, ReverseProcess, Schedule
from optcov.oracle import GaussianMixture

SCHEDULES = [
    (Schedule.linear(), 300),
    (Schedule.cosine(), 500),
    (Schedule.vp_sde(), 0.4),
    (Schedule.ve_sde(), 0.5),
]
CORRELATED = GaussianMixture(
    [1.0, 2.0, 3.0],
    [[-1.0, 0.5], [1.0, 0.0], [0.0, -1.0]],
    [
        [[0.3, 0.1], [0.1, 0.2]],
        [[0.1, -0.05], [-0.05, 0.4]],
        [[0.05, 0.0], [0.0, 0.0]],
    ],  # the last one is singular
)
LINE = GaussianMixture([0.3, 0.7], [[-0.8], [0.5]], [0.02, 0.1])


def grid_moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * values).sum() / weights.sum()
    return mean, (weights * (values - mean).square()).sum() / weights.sum()


@pytest.mark.parametrize(("schedule", "t"), SCHEDULES)
def test_posterior_moments_agree_with_quadrature(schedule, t):
    x_0 = torch.linspace(-6, 6, 200_001, dtype=torch.float64)
    prior = LINE.log_density(x_0[:, None], schedule, 0).exp()
    a, b = schedule.alpha_bar(t).sqrt(), schedule.beta_bar(t).sqrt()
    for x_t in (-1.3, 0.0, 0.6):
        eps = (x_t - a * x_0) / b
        weights = prior * torch.exp(-eps.square() / 2)
        point = torch.tensor([[x_t]], dtype=torch.float64)
        for values, moments in [
            (x_0, LINE.clean_moments(point, schedule, t)),
            (eps, LINE.noise_moments(point, schedule, t)),
        ]:
            mean, variance = grid_moments(values, weights)
            assert float(moments.mean) == pytest.approx(float(mean), rel=1e-8, abs=1e-9)
            assert float(moments.covariance) == pytest.approx(float(variance), rel=1e-8, abs=1e-10)
        square = (weights * eps.square()).sum() / weights.sum()
        assert float(moments.covariance + moments.mean.square()) == pytest.approx(float(square), rel=1e-8)


@pytest.mark.parametrize(("schedule", "t"), SCHEDULES)
def test_density_integrates_to_one_and_its_gradient_is_the_score(schedule, t):
    scale = float((schedule.alpha_bar(t) + schedule.beta_bar(t)).sqrt())
    grid = torch.linspace(-12 * scale, 12 * scale, 200_001, dtype=torch.float64)
    density = LINE.log_density(grid[:, None], schedule, t).exp()
    assert float(torch.trapezoid(density, grid)) == pytest.approx(1.0, abs=1e-10)
    x, h = torch.tensor([[0.3, -0.2]], dtype=torch.float64), 1e-5
    for axis in range(2):
        shift = torch.zeros(1, 2, dtype=torch.float64)
        shift[0, axis] = h
        rise = CORRELATED.log_density(x + shift, schedule, t) - CORRELATED.log_density(x - shift, schedule, t)
        score = -CORRELATED.noise_moments(x, schedule, t).mean[0, axis] / schedule.beta_bar(t).sqrt()
        assert float(rise / (2 * h)) == pytest.approx(float(score), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("schedule", "t"), SCHEDULES)
def test_noise_and_clean_moments_say_the_same(schedule, t):
    x_t = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise, clean = CORRELATED.noise_moments(x_t, schedule, t), CORRELATED.clean_moments(x_t, schedule, t)
    a, b = schedule.alpha_bar(t).sqrt(), schedule.beta_bar(t).sqrt()
    torch.testing.assert_close(a * clean.mean + b * noise.mean, x_t, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(clean.covariance * (a / b) ** 2, noise.covariance, rtol=1e-9, atol=1e-12)


def test_reverse_moments_agree_with_bayes_rule_on_a_grid():
    """q(x_s | x_t) ~ q(x_s) q(x_t | x_s) for the Markov forward process, which uses no bridge at all."""
    schedule, t, s = Schedule.linear(), 600, 350
    x_s = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    ratio = schedule.alpha_bar(t) / schedule.alpha_bar(s)
    for x_t in (-1.0, 0.1, 0.9):
        likelihood = -(x_t - ratio.sqrt() * x_s).square() / (2 * (1 - ratio))
        weights = (LINE.log_density(x_s[:, None], schedule, s) + likelihood).exp()
        mean, variance = grid_moments(x_s, weights)
        moments = LINE.reverse_moments(torch.tensor([[x_t]]).double(), ForwardProcess(schedule), t, s)
        assert float(moments.mean) == pytest.approx(float(mean), abs=1e-8)
        assert float(moments.covariance) == pytest.approx(float(variance), rel=1e-8)


def test_samples_have_the_mixtures_moments():
    """Means within 5 standard errors (level 1e-6), fixed seed."""
    count = 40_000
    drawn = CORRELATED.sample(count, seed=3)
    mean = (CORRELATED.weights[:, None] * CORRELATED.means).sum(0)
    error = drawn.std(0) / count**0.5
    assert bool(((drawn.mean(0) - mean).abs() < 5 * error).all())
    assert torch.equal(drawn, CORRELATED.sample(count, seed=3))


def test_the_network_has_perfect_heads_and_the_chosen_error():
    schedule, t = Schedule.linear(), 400
    x_t = torch.randn(6, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moments = CORRELATED.noise_moments(x_t, schedule, t)
    perfect = CORRELATED.network(schedule)(x_t, t)
    torch.testing.assert_close(perfect.noise, moments.mean)
    variance = moments.covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(perfect.head("sn"), variance + moments.mean.square())
    torch.testing.assert_close(perfect.head("npr"), variance)
    errors = {0.1: 0.1, lambda x, t: 0.1 * x: 0.1 * x_t, torch.tensor([0.1, -0.2]): torch.tensor([0.1, -0.2])}
    for error, offset in errors.items():
        off = CORRELATED.network(schedule, error=error)(x_t, t)
        torch.testing.assert_close(off.noise - moments.mean, torch.as_tensor(offset).double().expand(6, 2))
        torch.testing.assert_close(off.head("npr"), perfect.head("npr") + (off.noise - moments.mean).square())
        torch.testing.assert_close(off.head("sn"), perfect.head("sn"))


def test_images_and_batches_of_times_are_understood():
    schedule = Schedule.linear()
    data = GaussianMixture([1.0], torch.zeros(1, 12), torch.ones(1, 12))
    x_t = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    prediction = data.network(schedule)(x_t, torch.tensor([5, 900]))
    assert prediction.noise.shape == x_t.shape
    assert prediction.noise.dtype == torch.float32
    # for unit Gaussian data E[eps | x_t] = sqrt(beta_bar) x_t
    torch.testing.assert_close(prediction.noise[1], x_t[1] * schedule.beta_bar(900).sqrt().float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, -0.5], [[0.0], [1.0]], [1.0, 1.0]), "weights must be positive"),
        (([1.0], [[0.0], [1.0]], [1.0]), r"means must have shape \(1, d\)"),
        (([1.0], [[0.0, 0.0]], [[1.0, 1.0, 1.0]]), "covariances must have shape"),
        (([1.0], [[0.0, 0.0]], [[[1.0, 0.5], [0.0, 1.0]]]), "symmetric"),
        (([1.0], [[0.0, 0.0]], [[[1.0, 2.0], [2.0, 1.0]]]), "positive semi-definite"),
        (([1.0], [[float("nan")]], [1.0]), "means must be finite"),
        (([1.0], [[0.0]], [float("inf")]), "covariances must be finite"),
    ],
)
def test_bad_mixtures_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixture(*arguments)


def test_the_network_refuses_time_zero_and_integers():
    network = CORRELATED.network(Schedule.linear())
    with pytest.raises(ValueError, match="time 0 is data"):
        network(torch.zeros(1, 2), 0)
    with pytest.raises(ValueError, match=r"floating-point tensor, got torch\.int64"):
        network(torch.zeros(1, 2, dtype=torch.long), 5)
    assert "range" not in CORRELATED.network(Schedule.linear(1, scale=False))(torch.zeros(1, 2), 1).heads


def test_points_of_another_dimension_are_refused():
    with pytest.raises(ValueError, match="points have 3 entries, but this mixture lives in 2 dimensions"):
        CORRELATED.log_density(torch.zeros(1, 3), Schedule.linear(), 5)


@pytest.mark.parametrize(
    ("schedule", "t", "s"),
    [(Schedule.linear(), 400, 399), (Schedule.linear(), 1, 0), (Schedule.vp_sde(), 0.4, 0.399)],
)
def test_the_range_head_gives_the_optimal_variance_of_a_single_step(schedule, t, s):
    x_t = torch.randn(6, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    network, forward = CORRELATED.network(schedule, error=0.1), ForwardProcess(schedule)
    ranged = ReverseProcess(network, forward, "range", None).step(x_t, t, s)
    optimal = ReverseProcess(network, forward, "npr", None).step(x_t, t, s)
    inside = network(x_t, t).head("range").abs() < 1  # elsewhere the optimum lies beyond beta-tilde or beta
    torch.testing.assert_close(ranged.variance[inside], optimal.variance[inside], rtol=1e-9, atol=0)
    assert bool(inside.all()) == (s > 0)


def test_gradients_flow_through_the_network():
    schedule = Schedule.linear()
    x_t = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    network = CORRELATED.network(schedule, error=0.1)
    assert torch.autograd.gradcheck(lambda x: network(x, 400).noise, x_t)


def test_a_rotated_covariance_is_symmetric_enough():
    q = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    data = GaussianMixture([1.0], torch.zeros(1, 5), (q * 0.3) @ q.T[None])
    assert data.sample(3).shape == (3, 5)


def test_classes_that_are_beyond_belief_have_the_logarithm_of_their_share():
    data = GaussianMixture([0.5, 0.5], [[-5.0], [5.0]], [0.01, 0.01], labels=[0, 1])
    found = data.class_log_probabilities(torch.tensor([[4.0]]), Schedule.linear(), 0)
    expected = -((4.0 + 5.0) ** 2 - (4.0 - 5.0) ** 2) / (2 * 0.01)
    torch.testing.assert_close(found, torch.tensor([[expected, 0.0]], dtype=torch.float64), rtol=1e-12, atol=0)
