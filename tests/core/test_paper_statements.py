"""The paper's lemmas, theorems and propositions, on the oracle, where every expectation is exact or a quadrature.

Expectations over x_t are sums over a grid of q(x_t), so that inequalities between bounds hold or fail without chance.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from optcov import ForwardProcess, ReverseProcess, Schedule
from optcov.covariances import SquaredNoise, squared_noise
from optcov.oracle import GaussianMixture
from optcov.prediction import Prediction

SCHEDULE = Schedule.linear()
PLANE = GaussianMixture(
    [0.5, 0.3, 0.2], [[-0.8, -0.3], [0.6, 0.4], [0.1, -0.7]], [[0.02, 0.1], [0.05, 0.03], [0.01, 0.2]]
)
CORRELATED = GaussianMixture(
    [0.4, 0.6], [[-0.7, 0.2], [0.5, 0.1]], [[[0.1, 0.08], [0.08, 0.1]], [[0.2, -0.1], [-0.1, 0.1]]]
)
STEPS = [(1000, 889), (700, 500), (500, 112), (112, 1), (20, 10), (1, 0)]


def imperfect(x_t: Tensor, t: object) -> Tensor:
    """An error of the mean that depends on the point."""
    return 0.15 * torch.sin(3 * x_t) + 0.05


def grid(data: GaussianMixture, t: float, points: int = 121) -> tuple[Tensor, Tensor]:
    """Points x_t that cover q(x_t), (n, 2), and their probabilities, (n,)."""
    spread = float((SCHEDULE.alpha_bar(t) * 0.3 + SCHEDULE.beta_bar(t)).sqrt())
    reach = float(SCHEDULE.alpha_bar(t).sqrt()) + 6 * spread
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    x_t = torch.cartesian_prod(axis, axis)
    weights = data.log_density(x_t, SCHEDULE, t).exp()
    return x_t, weights / weights.sum()


def cross_entropy(data: GaussianMixture, process: ReverseProcess, x_t: Tensor, t: float, s: float) -> Tensor:
    """E_q[-log p(x_s | x_t)] per point and axis, (n, 2); differs from the KL by a constant of the data alone."""
    exact, step = data.reverse_moments(x_t, process.forward, t, s), process.step(x_t, t, s)
    second_moment = exact.covariance.diagonal(dim1=-2, dim2=-1) + (step.mean - exact.mean).square()
    variance = step.variance.expand_as(x_t)
    return 0.5 * (math.log(2 * math.pi) + variance.log() + second_moment / variance)


def make(data: GaussianMixture, covariance: str, t: float, eta: float = 1.0, error: object = None) -> ReverseProcess:
    """A process on unbounded data; the numbers per time are exact integrals over the grid."""
    network = data.network(SCHEDULE, error)
    x_t, weights = grid(data, t)
    prediction = network(x_t, t)
    return ReverseProcess(
        network,
        ForwardProcess(SCHEDULE, eta),
        covariance,
        None,
        mean_square_noise=lambda _: (weights[:, None] * prediction.noise.square()).sum() / 2,
        mean_square_residual=lambda _: (weights[:, None] * prediction.head("npr")).sum() / 2,
    )


def expected_bound(data: GaussianMixture, covariance: str, t: float, s: float, error: object = None) -> float:
    x_t, weights = grid(data, t)
    process = make(data, covariance, t, error=error)
    return float((weights * cross_entropy(data, process, x_t, t, s).sum(1)).sum())


class TestLemma1:
    """Conditioned moment matching, by numerical minimisation of the KL to a mixture that is no Gaussian."""

    x = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    q = 0.3 * torch.exp(-(x + 1).square() / 0.1) / math.sqrt(0.1) + 0.7 * torch.exp(
        -(x - 1.5).square() / 0.6
    ) / math.sqrt(0.6)
    q = q / q.sum()
    mean = float((q * x).sum())
    variance = float((q * (x - mean).square()).sum())

    def kl(self, mean: float, log_variance: float) -> float:
        log_p = -0.5 * (math.log(2 * math.pi) + log_variance + (self.x - mean).square() / math.exp(log_variance))
        return float((self.q * (self.q.clamp(min=1e-300).log() - log_p)).sum())

    @pytest.mark.parametrize("variance", [0.1, 1.0, 7.0])
    def test_for_any_variance_the_best_mean_is_that_of_q(self, variance):
        found = minimize(lambda p: self.kl(p[0], math.log(variance)), [0.0], tol=1e-12)
        assert found.x[0] == pytest.approx(self.mean, abs=1e-5)

    @pytest.mark.parametrize("mean", [-2.0, 0.3, 4.0])
    def test_for_any_mean_the_best_variance_is_corrected_by_its_error(self, mean):
        found = minimize(lambda p: self.kl(mean, p[0]), [0.0], tol=1e-12)
        assert math.exp(found.x[0]) == pytest.approx(self.variance + (mean - self.mean) ** 2, rel=1e-5)

    def test_the_best_pair_are_the_moments_of_q(self):
        found = minimize(lambda p: self.kl(p[0], p[1]), [0.5, 0.5], tol=1e-12)
        assert found.x[0] == pytest.approx(self.mean, abs=1e-4)
        assert math.exp(found.x[1]) == pytest.approx(self.variance, rel=1e-4)


def test_lemma_b_1_for_any_mean_the_best_full_covariance_is_corrected_by_its_outer_product():
    """By numerical minimisation over a Cholesky factor, for the posterior of a correlated mixture."""
    t, x_t = 300, torch.tensor([[0.1, -0.3]], dtype=torch.float64)
    q = CORRELATED.clean_moments(x_t, SCHEDULE, t)
    offset = torch.tensor([0.3, -0.2], dtype=torch.float64)
    best = q.covariance[0] + torch.outer(offset, offset)

    def cross_entropy(entries):
        root = torch.tensor([[math.exp(entries[0]), 0.0], [entries[1], math.exp(entries[2])]], dtype=torch.float64)
        return float(torch.cholesky_solve(best, root).trace() / 2 + root.diagonal().log().sum())

    found = minimize(cross_entropy, [0.0, 0.0, 0.0], tol=1e-12).x
    root = torch.tensor([[math.exp(found[0]), 0.0], [found[1], math.exp(found[2])]], dtype=torch.float64)
    step = make(CORRELATED, "npr_full", t, error=lambda x, t: -offset * (SCHEDULE.log_snr(t) / 2).exp()).posterior(
        x_t, t
    )
    torch.testing.assert_close(step.covariance.matrix[0], root @ root.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("t", "s"), STEPS)
@pytest.mark.parametrize("eta", [1.0, 0.5, 0.0])
def test_theorem_1_the_joint_optimum_is_the_exact_transition(t, s, eta):
    x_t = grid(PLANE, t, 9)[0]
    exact = PLANE.reverse_moments(x_t, ForwardProcess(SCHEDULE, eta), t, s)
    step = make(PLANE, "sn", t, eta).step(x_t, t, s)
    torch.testing.assert_close(step.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(step.variance, exact.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("t", "s"), STEPS[:-1])
@pytest.mark.parametrize("covariance", ["beta", "beta_tilde", "analytic", "npr"])
def test_theorem_2_the_best_mean_does_not_depend_on_the_covariance(covariance, t, s):
    """At every point any other mean is worse, whichever covariance is given; the means tried are +- 1e-3 away."""
    x_t = grid(PLANE, t, 21)[0]
    step = make(PLANE, covariance, t).step(x_t, t, s)
    exact = PLANE.reverse_moments(x_t, ForwardProcess(SCHEDULE), t, s)
    variance = step.variance.expand_as(x_t)

    def bound(mean: Tensor) -> Tensor:
        return (exact.covariance.diagonal(dim1=-2, dim2=-1) + (mean - exact.mean).square()) / variance

    for offset in (-1e-3, 1e-3):
        assert bool((bound(step.mean) < bound(step.mean + offset)).all())


@pytest.mark.parametrize(("t", "s"), STEPS)
@pytest.mark.parametrize("eta", [1.0, 0.0])
def test_theorem_3_npr_is_the_exact_variance_plus_the_squared_error_of_the_mean(t, s, eta):
    x_t = grid(PLANE, t, 9)[0]
    exact = PLANE.reverse_moments(x_t, ForwardProcess(SCHEDULE, eta), t, s)
    step = make(PLANE, "npr", t, eta, imperfect).step(x_t, t, s)
    best = exact.covariance.diagonal(dim1=-2, dim2=-1) + (step.mean - exact.mean).square()
    torch.testing.assert_close(step.variance, best, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("factor", [0.7, 0.99, 1.01, 1.5])
def test_theorem_3_any_other_variance_is_worse_at_every_point(factor):
    t, s = 500, 112
    x_t = grid(PLANE, t, 21)[0]
    process = make(PLANE, "npr", t, error=imperfect)
    exact, step = PLANE.reverse_moments(x_t, process.forward, t, s), process.step(x_t, t, s)
    second = exact.covariance.diagonal(dim1=-2, dim2=-1) + (step.mean - exact.mean).square()

    def bound(variance: Tensor) -> Tensor:
        return variance.log() + second / variance

    assert bool((bound(step.variance) < bound(factor * step.variance)).all())


@pytest.mark.parametrize(("t", "s"), [(0.9, 0.5), (0.3, 0.05), (0.01, 0.001), (0.2, 0.0)])
def test_propositions_5_1_and_5_2_hold_at_real_times(t, s):
    schedule = Schedule.vp_sde()
    x_t = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = PLANE.reverse_moments(x_t, ForwardProcess(schedule), t, s)
    diagonal = exact.covariance.diagonal(dim1=-2, dim2=-1)
    perfect = ReverseProcess(PLANE.network(schedule), ForwardProcess(schedule), "sn", None).step(x_t, t, s)
    torch.testing.assert_close(perfect.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(perfect.variance, diagonal, rtol=1e-8, atol=1e-11)
    off = ReverseProcess(PLANE.network(schedule, imperfect), ForwardProcess(schedule), "npr", None).step(x_t, t, s)
    torch.testing.assert_close(off.variance, diagonal + (off.mean - exact.mean).square(), rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(("t", "s"), [(700, 500), (112, 1), (1, 0)])
def test_proposition_a_5_a_diagonal_covariance_is_strictly_better_than_an_isotropic_one(t, s):
    equal = GaussianMixture([0.5, 0.5], [[-0.6, 0.2], [0.5, -0.3]], [0.04, 0.04])  # q(x_0) = sum N(mu_j, c I)
    gain = expected_bound(equal, "analytic", t, s) - expected_bound(equal, "sn", t, s)
    assert gain > 1e-9


@pytest.mark.parametrize(("t", "s"), STEPS)
def test_full_covariance_the_joint_optimum_is_the_exact_covariance(t, s):
    x_t = grid(CORRELATED, t, 9)[0]
    exact = CORRELATED.reverse_moments(x_t, ForwardProcess(SCHEDULE), t, s)
    step = make(CORRELATED, "sn_full", t).step(x_t, t, s)
    torch.testing.assert_close(step.covariance.matrix, exact.covariance, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("t", "s"), STEPS)
def test_full_covariance_npr_adds_the_outer_product_of_the_error(t, s):
    x_t = grid(CORRELATED, t, 9)[0]
    exact = CORRELATED.reverse_moments(x_t, ForwardProcess(SCHEDULE), t, s)
    step = make(CORRELATED, "npr_full", t, error=imperfect).step(x_t, t, s)
    error = step.mean - exact.mean
    torch.testing.assert_close(
        step.covariance.matrix,
        exact.covariance + error.unsqueeze(-1) * error.unsqueeze(-2),
        rtol=1e-7,
        atol=1e-10,
    )


def test_full_covariance_is_better_than_diagonal_where_pixels_are_correlated():
    t, s = 300, 100
    x_t, weights = grid(CORRELATED, t, 41)
    exact = CORRELATED.reverse_moments(x_t, ForwardProcess(SCHEDULE), t, s)
    diagonal = exact.covariance.diagonal(dim1=-2, dim2=-1)
    gain = 0.5 * (diagonal.log().sum(1) - torch.logdet(exact.covariance))  # difference of the optimal bounds
    full, flat = make(CORRELATED, "npr_full", t).step(x_t, t, s), make(CORRELATED, "npr", t).step(x_t, t, s)
    torch.testing.assert_close(flat.entropy() - full.entropy(), gain, rtol=1e-7, atol=1e-9)
    assert float((weights * gain).sum()) > 0.01


def test_sn_full_of_an_imperfect_mean_need_not_be_positive_definite_and_survives():
    t, s = 300, 100
    x_t = grid(CORRELATED, t, 9)[0]
    process = make(CORRELATED, "sn_full", t, error=lambda x, t: 0.6 * torch.sign(x))
    step = process.step(x_t, t, s)
    assert process.bounds.below > 0
    assert bool(step.sample(torch.ones_like(x_t)).isfinite().all())


def test_error_amplification_of_sn():
    """|eps_hat^2 - E[eps]^2| = A_i |eps_hat - E[eps]| with A_i = |eps_hat + E[eps]|, and so SN's variance errs."""
    t = 300
    x_t = grid(PLANE, t, 21)[0]
    true = PLANE.noise_moments(x_t, SCHEDULE, t)
    prediction = PLANE.network(SCHEDULE, imperfect)(x_t, t)
    amplification = (prediction.noise + true.mean).abs()
    error = (prediction.noise - true.mean).abs()
    ratio = SCHEDULE.beta_bar(t) / SCHEDULE.alpha_bar(t)
    known = Prediction.of(prediction, x_t, t, *SCHEDULE.levels(t))
    estimate = SquaredNoise().second_moment(known).diagonal(x_t)
    exact = ratio * true.covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close((estimate - exact).abs(), ratio * amplification * error, rtol=1e-7, atol=1e-10)
    assert float(amplification.max()) > 2  # it does amplify


@pytest.mark.parametrize("form", ["of the noise", "of the velocity", "of the velocity, less its square"])
def test_the_squared_noise_of_the_paper_is_there_whatever_the_head_predicts(form):
    t = 300
    x_t = grid(PLANE, t, 21)[0]
    answer = PLANE.network(SCHEDULE)(x_t, t)
    known = Prediction.of(answer, x_t, t, *SCHEDULE.levels(t))
    if form != "of the noise":
        excess = SquaredNoise().second_moment(known).diagonal(x_t) / known.factor("velocity")
        square = 0 if form.endswith("square") else known.in_unit("velocity").square()
        known = known.with_heads({"sn": excess + square}, {"sn": "velocity"}, () if form.endswith("city") else ["sn"])
    torch.testing.assert_close(squared_noise(known), answer.heads["sn"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("t", "s"), STEPS)
@pytest.mark.parametrize("eta", [1.0, 0.0])
def test_with_a_perfect_mean_sn_equals_npr_at_every_point(t, s, eta):
    x_t = grid(PLANE, t, 41)[0]
    sn, npr = (make(PLANE, covariance, t, eta).step(x_t, t, s).variance for covariance in ("sn", "npr"))
    assert float((sn - npr).abs().max()) <= 1e-10


@pytest.mark.parametrize(("t", "s"), STEPS[:-1])
def test_with_a_perfect_mean_the_bounds_are_ordered(t, s):
    bounds = {d: expected_bound(PLANE, d, t, s) for d in ("sn", "npr", "analytic", "beta", "beta_tilde")}
    assert bounds["sn"] == pytest.approx(bounds["npr"], abs=1e-9)
    assert bounds["npr"] <= bounds["analytic"] + 1e-12
    assert bounds["analytic"] <= min(bounds["beta"], bounds["beta_tilde"]) + 1e-9


@pytest.mark.parametrize(("t", "s"), STEPS[:-1])
def test_with_an_imperfect_mean_npr_is_the_best_diagonal_covariance_at_every_point(t, s):
    x_t = grid(PLANE, t, 41)[0]
    best = cross_entropy(PLANE, make(PLANE, "npr", t, error=imperfect), x_t, t, s)
    for covariance in ("sn", "analytic", "npr_isotropic", "beta", "beta_tilde", "range"):
        other = cross_entropy(PLANE, make(PLANE, covariance, t, error=imperfect), x_t, t, s)
        assert bool((best <= other + 1e-12).all()), covariance


@pytest.mark.parametrize(("t", "s"), STEPS[:-1])
def test_with_an_imperfect_mean_isotropic_npr_is_the_best_isotropic_covariance(t, s):
    bounds = {d: expected_bound(PLANE, d, t, s, imperfect) for d in ("npr_isotropic", "analytic", "beta", "beta_tilde")}
    for covariance in ("analytic", "beta", "beta_tilde"):
        assert bounds["npr_isotropic"] <= bounds[covariance] + 1e-12, covariance
