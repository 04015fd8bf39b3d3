"""One step of each baseline is the formula of its paper, written out by dense matrices on a Gaussian prior."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optcov import ForwardProcess, ReverseProcess, Schedule, oracle
from optcov.inverse import Linear, restore
from optcov.inverse.conditioning import StoppingRule
from optcov.inverse.guides import DPS, DiffPIR, Draws, Guide, PiGDM
from optcov.noise import NoiseSource

D, M, BATCH = 6, 3, 2
T, S, NOISE_STD = 600, 400, 0.2
SCHEDULE = Schedule.linear()
ALPHA_T, ALPHA_S = (float(SCHEDULE.alpha_bar(t)) for t in (T, S))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ROOT = random(D, D, seed=1)
COVARIANCE = ROOT @ ROOT.T / D + 0.2 * torch.eye(D, dtype=torch.float64)
PRIOR = oracle.GaussianMixture([1.0], torch.zeros(1, D, dtype=torch.float64), COVARIANCE[None])
A = random(M, D, seed=2)
OPERATOR = Linear(lambda x: x @ A.to(x).T, lambda y: y @ A.to(y), (D,))
X_T, Y = random(BATCH, D, seed=3), random(BATCH, M, seed=4)

# E[x_0 | x_t] = JACOBIAN x_t for this prior
JACOBIAN = ALPHA_T**0.5 * COVARIANCE @ torch.linalg.inv(ALPHA_T * COVARIANCE + (1 - ALPHA_T) * torch.eye(D))
CLEAN = X_T @ JACOBIAN.T
EPS = (X_T - ALPHA_T**0.5 * CLEAN) / (1 - ALPHA_T) ** 0.5


def one_step(kind: type[Guide], **options: float) -> tuple[Tensor, Tensor]:
    """x_s, and the noise that the step drew."""
    process = ReverseProcess(PRIOR.network(SCHEDULE), ForwardProcess(SCHEDULE, 1.0), "beta_tilde", data_range=None)
    images = NoiseSource((BATCH, D), 0, range(BATCH), dtype=torch.float64)
    draws = Draws(images, NoiseSource((BATCH, M), 0, range(BATCH), dtype=torch.float64), 1)
    guide = kind(process, OPERATOR, NOISE_STD, StoppingRule(1e-12), **options)
    with torch.no_grad():
        return guide.step(X_T, Y, T, S, draws, {}), draws.bridge()


def ddpm_step(clean: Tensor, noise: Tensor) -> Tensor:
    """DDIM's step with eta = 1 (Song et al. 2021, Eq. 12 and 16)."""
    sigma = ((1 - ALPHA_S) / (1 - ALPHA_T) * (1 - ALPHA_T / ALPHA_S)) ** 0.5
    return ALPHA_S**0.5 * clean + (1 - ALPHA_S - sigma**2) ** 0.5 * EPS + sigma * noise


def test_dps_goes_down_the_gradient_of_the_norm():
    """Chung et al. 2023, Algorithm 1, the step length over the norm of the residual, as in their code."""
    found, noise = one_step(DPS, strength=0.7)
    at = X_T.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((Y - at @ JACOBIAN.T @ A.T).norm(dim=1).sum(), at)
    assert torch.allclose(found, ddpm_step(CLEAN, noise) - 0.7 * gradient, atol=1e-9)


def test_pigdm_adds_the_pseudo_inverse_guidance():
    """Song et al. 2023, Algorithm 1: g = r^2 J^T A^T (r^2 A A^T + noise^2 I)^-1 (y - A x0_hat), times sqrt(alpha_t)."""
    found, noise = one_step(PiGDM)
    r2 = 1 - ALPHA_T
    inner = r2 * A @ A.T + NOISE_STD**2 * torch.eye(M, dtype=torch.float64)
    g = r2 * (Y - CLEAN @ A.T) @ torch.linalg.inv(inner) @ A @ JACOBIAN
    assert torch.allclose(found, ddpm_step(CLEAN, noise) + ALPHA_T**0.5 * g, atol=1e-9)


def test_diffpir_takes_the_proximal_point_and_keeps_part_of_the_noise():
    """Zhu et al. 2023, Algorithm 1: rho = lambda noise^2 / sigma_t^2, zeta = 0.3."""
    found, noise = one_step(DiffPIR, strength=5.0)
    rho = 5.0 * NOISE_STD**2 * ALPHA_T / (1 - ALPHA_T)
    normal = A.T @ A + rho * torch.eye(D, dtype=torch.float64)
    x_0 = torch.linalg.solve(normal, (Y @ A + rho * CLEAN).T).T
    implied = (X_T - ALPHA_T**0.5 * x_0) / (1 - ALPHA_T) ** 0.5
    mixed = 0.7**0.5 * implied + 0.3**0.5 * noise
    assert torch.allclose(found, ALPHA_S**0.5 * x_0 + (1 - ALPHA_S) ** 0.5 * mixed, atol=1e-9)


@pytest.mark.parametrize("method", ["npr", "DPS", "PiGDM", "DiffPIR"])
def test_times_without_signal_are_restored_from(method: str):
    """At the first time of flow matching x_t is noise alone: x0_hat does not depend on it."""
    schedule = Schedule.flow()
    network = PRIOR.network(schedule, prediction_type="v_prediction")
    prior = ReverseProcess(network, ForwardProcess(schedule, 1.0), "npr", data_range=None)
    found = restore(prior, Y, OPERATOR, NOISE_STD, method=method, steps=8, samples=50)
    assert bool(found.samples.isfinite().all())
    if method == "npr":
        assert float(found.residual.mean()) < 3 * NOISE_STD
