"""No NaN leaves the library for any finite head output; what was clamped is counted and reported once."""

from __future__ import annotations

import sys

import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule
from optcov.bundle import Bundle
from optcov.cli import main
from small_bundles import small_bundle

COVARIANCES = ("beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr", "range")
LENGTHS = (10, 100, 1000, 4000)
STEPS = 1900  # per covariance, length and type: 7 * 4 * 2 * 1900 > 1e5


def wild(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Finite float32 numbers of either sign and of every magnitude, zeros and the largest ones among them."""
    exponent = torch.empty(shape).uniform_(-45, 38.5, generator=generator)
    sign = torch.randint(-1, 2, shape, generator=generator)
    return (sign * 10.0 ** exponent.double()).float().clamp(-3.4e38, 3.4e38)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_no_nan_for_any_finite_head_output(covariance, N, dtype):
    """The data have a range, as images do; every step has times, a point and a head output of its own."""
    generator = torch.Generator().manual_seed(N)
    t = torch.randint(1, N + 1, (STEPS,), generator=generator)
    s = (torch.rand(STEPS, generator=generator) * t).long()
    s[: STEPS // 10], t[STEPS // 10 : STEPS // 5] = 0, N
    x_t = (3 * torch.randn(STEPS, 4, generator=generator)).to(dtype)
    noise = torch.randn(STEPS, 4, generator=generator).to(dtype)
    head = wild((STEPS, 4), generator).to(dtype)
    head = torch.where(head.isfinite(), head, torch.zeros_like(head))  # bfloat16 rounds the largest ones to infinity

    def network(x_t, t):
        return NoisePrediction(noise, {"sn": head, "npr": head, "range": head})

    for eta in (1.0,) if covariance in ("beta", "range") else (1.0, 0.0):
        process = ReverseProcess(
            network,
            ForwardProcess(Schedule.cosine(N) if N % 1000 else Schedule.linear(N), eta),
            covariance,
            mean_square_noise=torch.full((N + 1,), 0.9),
            mean_square_residual=torch.full((N + 1,), 0.1),
        )
        step = process.step(x_t, t, s)
        drawn = step.sample(torch.randn(STEPS, 4, generator=generator))
        assert bool(step.mean.isfinite().all())
        assert bool(step.variance.isfinite().all())
        assert bool((step.variance >= 0).all())
        assert bool(drawn.isfinite().all())
        if covariance == "sn":
            assert process.bounds.total == STEPS * 4
            assert 0 < process.bounds.below < STEPS * 4  # a good half: every output below eps_hat^2


def test_clamped_variances_are_reported_once(tmp_path, monkeypatch, capsys):
    bundle = small_bundle(Schedule.linear(24))
    with torch.no_grad():
        bundle.heads["sn"].conv.bias.fill_(-20.0)  # h is almost 0, so that h - eps_hat^2 is negative
    Bundle(bundle.network, bundle.image_shape, numbers=bundle.numbers).save(tmp_path / "bundle")
    arguments = f"sample {tmp_path / 'bundle'} --method SN-DDPM --steps 4 --n 6 --batch-size 2 --out {tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", ["optcov", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    said = [line for line in capsys.readouterr().err.splitlines() if "of the variances were negative" in line]
    assert len(said) == 1
    assert float(said[0].split("%")[0]) > 90
