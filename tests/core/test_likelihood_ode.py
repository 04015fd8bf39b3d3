"""The probability-flow likelihood: exact for Gaussians, whatever the probe."""

from __future__ import annotations

import pytest
import torch

from optcov import NoisePrediction, Schedule, oracle
from optcov.likelihood import ode_likelihood

GENERATOR = torch.Generator().manual_seed(0)
ROOT = torch.randn(5, 5, generator=GENERATOR, dtype=torch.float64) / 2
COVARIANCE = ROOT @ ROOT.T + 0.05 * torch.eye(5, dtype=torch.float64)
MEAN = torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4], dtype=torch.float64)


def gaussian_network(schedule, covariance=COVARIANCE):
    """The exact noise predictor of N(MEAN, covariance), differentiable."""
    identity = torch.eye(len(MEAN), dtype=torch.float64)

    def network(x, t):
        alpha_bar, beta_bar = schedule.alpha_bar(t), schedule.beta_bar(t)
        total = alpha_bar * covariance + beta_bar * identity
        deviation = x.double() - alpha_bar.sqrt() * MEAN
        return NoisePrediction((beta_bar.sqrt() * torch.linalg.solve(total, deviation.T).T).to(x.dtype))

    return network


def exact_log_density(x, covariance=COVARIANCE):
    return oracle.GaussianMixture([1.0], MEAN[None], covariance[None]).log_density(x, Schedule.vp_sde(), 0)


@pytest.mark.parametrize(
    "schedule", [Schedule.vp_sde(), Schedule.ve_sde(sigma_min=0.01, sigma_max=50)], ids=["vp", "ve"]
)
def test_exact_for_a_gaussian_without_correlations(schedule):
    """Within 1e-3 nats/dim of the exact value, over 64 draws.

    A Rademacher probe makes the divergence of a diagonal Jacobian exact, so that only two gaps are left: the solver's,
    and that of the prior, which differs from the diffused data by about 1e-3 per image but not on average.
    """
    covariance = torch.diag(torch.tensor([0.02, 0.3, 1.0, 0.1, 0.5], dtype=torch.float64))
    x_0 = oracle.GaussianMixture([1.0], MEAN[None], covariance[None]).sample(64, seed=1)
    found = ode_likelihood(gaussian_network(schedule, covariance), schedule, x_0, data_range=None)
    gap = (found.log_density - exact_log_density(x_0, covariance)) / 5
    assert abs(float(gap.mean())) < 1e-3
    assert float(gap.abs().max()) < 1e-2
    assert 10 < found.evaluations < 2000


def test_unbiased_for_a_gaussian_with_correlations():
    """Mean over 400 probes of the same point, at 4 standard errors and within 1e-3 nats/dim of what they allow."""
    schedule = Schedule.vp_sde()
    x_0 = (MEAN + 0.1).expand(400, 5).clone()
    found = ode_likelihood(gaussian_network(schedule), schedule, x_0, data_range=None, rtol=1e-4)
    gap = found.log_density - exact_log_density(x_0)
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / 20 + 5e-3


def test_dequantisation_is_uniform_over_bins_and_bits_count_the_bin():
    schedule = Schedule.vp_sde()
    x_0 = torch.zeros(4, 5) + 1 / 255
    network = gaussian_network(schedule, torch.eye(5, dtype=torch.float64))
    found = ode_likelihood(network, schedule, x_0, data_range=(-1, 1))
    density = exact_log_density(x_0, torch.eye(5, dtype=torch.float64))
    nats = density + 5 * torch.log(torch.tensor(2 / 255, dtype=torch.float64))
    expected = -nats / (5 * torch.log(torch.tensor(2.0, dtype=torch.float64)))
    torch.testing.assert_close(found.bits_per_dim(), expected, rtol=0, atol=0.01)


def test_seeds_belong_to_images():
    schedule = Schedule.vp_sde()
    x_0 = torch.zeros(3, 5)
    network = gaussian_network(schedule)
    whole = ode_likelihood(network, schedule, x_0, rtol=1e-6, atol=1e-6).log_density
    last = ode_likelihood(network, schedule, x_0[2:], rtol=1e-6, atol=1e-6, images=[2]).log_density
    torch.testing.assert_close(whole[2:], last, rtol=0, atol=1e-3)


def test_mistakes_are_named():
    schedule = Schedule.vp_sde()
    x_0 = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="no real times"):
        ode_likelihood(gaussian_network(schedule), Schedule.linear(), x_0)
    with pytest.raises(ValueError, match="does not depend on its input"):
        ode_likelihood(lambda x, t: NoisePrediction(x.detach()), schedule, x_0)
