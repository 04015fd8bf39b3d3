"""A bundle inside azula, with the real package."""

from __future__ import annotations

import pytest
import torch

from optcov import Schedule
from optcov.bundle.spectra import Spectra
from small_bundles import SHAPE, small_bundle

pytest.importorskip("azula.sample")

from azula.guidance import MMPSDenoiser
from azula.linalg.covariance import IsotropicCovariance
from azula.sample import DDIMSampler, DDPMSampler

from optcov.integrations.azula import BundleDenoiser


def noisy() -> torch.Tensor:
    return torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("schedule", [Schedule.linear(100), Schedule.vp_sde()], ids=["discrete", "real times"])
def test_the_posterior_is_the_bundles_own(schedule: Schedule):
    bundle = small_bundle(schedule)
    denoiser = BundleDenoiser(bundle)
    with torch.no_grad():
        found = denoiser(noisy(), torch.tensor(0.5))
    own = bundle.posterior(noisy(), 0.5 * schedule.final_time)
    assert torch.allclose(found.mean.clamp(-1, 1), own.mean, atol=1e-5)
    assert torch.allclose(found.var, own.variance, atol=1e-5)
    alpha, sigma = denoiser.schedule(torch.tensor([0.0, 0.5]))
    assert float(alpha[0]) == pytest.approx(1)
    assert float(sigma[1]) ** 2 == pytest.approx(float(schedule.beta_bar(0.5 * schedule.final_time)), rel=1e-5)


@pytest.mark.parametrize("kind", [DDPMSampler, DDIMSampler])
def test_samplers_of_azula_run_on_it(kind):
    sampler = kind(BundleDenoiser(small_bundle(Schedule.vp_sde()), clip=True), steps=4, silent=True)
    x_0 = sampler(noisy())
    assert x_0.shape == (2, *SHAPE)
    assert float(x_0.abs().max()) <= 1 + 1e-5


def test_a_deterministic_sampler_takes_our_own_steps():
    """azula's DDIM at eta = 0 is our DDIM from the same noise, when x0_hat is clipped and noise is derived again."""
    bundle = small_bundle(Schedule.vp_sde())
    sampler = DDIMSampler(BundleDenoiser(bundle, clip=True), steps=4, eta=0.0, silent=True)
    process = bundle.reverse_process("DDIM", use_clipped_model_output=True)
    x = noisy()
    with torch.no_grad():
        for t, s in ((1.0, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0.0)):
            x = process.step(x, t, s).mean
    assert torch.allclose(sampler(noisy()), x, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch, called by azula
def test_guidance_of_azula_takes_its_gradient():
    denoiser = BundleDenoiser(small_bundle(Schedule.vp_sde()))
    seen, noise = torch.zeros(2, 64), IsotropicCovariance(torch.tensor(0.01))
    guided = MMPSDenoiser(denoiser, seen, lambda x: x.flatten(1), noise)  # its solvers see a system in the last axis
    plain, pulled = denoiser(noisy(), torch.tensor(0.3)).mean, guided(noisy(), torch.tensor(0.3)).mean
    assert float(pulled.square().sum()) < float(plain.square().sum())


def test_time_zero_is_refused():
    with pytest.raises(ValueError, match="time 0 is data"):
        BundleDenoiser(small_bundle(Schedule.vp_sde()))(noisy(), torch.tensor(0.0))


def test_a_method_without_a_posterior_is_refused():
    with pytest.raises(ValueError, match="no head 'range'|says nothing of x_0"):
        BundleDenoiser(small_bundle(Schedule.vp_sde()), "Improved DDPM")


def test_a_method_that_correlates_pixels_is_refused():
    """Its diagonal alone would be another covariance."""
    bundle = small_bundle(Schedule.vp_sde())
    times = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    spectra = Spectra(times, dict.fromkeys(("residual", "npr", "sn"), torch.ones(3, *SHAPE)))
    with pytest.raises(ValueError, match="CNPR-DDPM correlates pixels"):
        BundleDenoiser(bundle.with_spectra(spectra), "CNPR-DDPM")
