"""Spectra in a bundle: measured by fit, stored, moved to other schedules, refused if unfit; and what a fit costs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import optcov
from optcov import Schedule, storage
from optcov.bundle import BundleError, Spectra
from optcov.bundle.saving import SPECTRA
from optcov.bundle.spectra import MOST_BANDS, band_shape, banded, bands_of, unbanded
from optcov.covariances import Example
from optcov.fitting.fit import FitPlan
from optcov.fitting.settings import FitSettings
from optcov.fitting.spectra import STORED_TIMES, SpectrumMeter, local_fit
from optcov.forward import ForwardProcess
from optcov.gaussian import cosine_matrix
from optcov.networks import HeadedNetwork
from optcov.prediction import NoisePrediction, Prediction
from small_bundles import SHAPE, small_bundle, small_head

QUICK = {"images": 32, "measure_images": 4, "times": 12, "calibration_samples": 64, "batch_size": 8, "progress": False}


def images(count: int = 64, shape: tuple[int, ...] = SHAPE) -> Tensor:
    smooth = torch.randn(count, *shape, generator=torch.Generator().manual_seed(3)).cumsum(-1).cumsum(-2)
    return (smooth / smooth.abs().amax((1, 2, 3), keepdim=True)).float()


@pytest.fixture(scope="module")
def fitted() -> optcov.Bundle:
    return optcov.fit(small_bundle(), images(), heads=("sn", "npr"), **QUICK)


def test_a_fit_measures_what_every_correlated_covariance_needs(fitted):
    assert set(fitted.spectra.names) == {"residual", "npr", "sn"}
    for name in ("npr", "sn"):  # correlations
        mean = fitted.spectra.powers[name].double().flatten(1).mean(1)
        torch.testing.assert_close(mean, torch.ones_like(mean), rtol=1e-3, atol=0)
    x_t = images(2)
    for method in ("Spectral-DDPM", "CNPR-DDPM", "CNPR-DDIM", "CSN-DDPM"):
        step = fitted.reverse_process(method).step(x_t, 0.5, 0.3)
        assert bool(step.log_prob(step.mean).isfinite().all())
        assert fitted.sample(2, method=method, steps=3, progress=False).shape == (2, *SHAPE)


def test_bits_per_dim_scores_them_at_even_times(fitted):
    score = fitted.bits_per_dim(images(4), steps=4, methods=["NPR-DDPM", "CNPR-DDPM", "Spectral-DDPM"], progress=False)
    by_elbo = optcov.elbo(fitted.reverse_process("CNPR-DDPM"), images(4), optcov.Trajectory.even(fitted.schedule, 4))
    assert score.of("npr_correlated", 4).mean == pytest.approx(float(by_elbo.bits_per_dim().mean()), rel=1e-6)
    with pytest.raises(ValueError, match="8-bit bins are single pixels"):
        fitted.bits_per_dim(images(4), steps=4, methods=["CNPR-DDPM"], last_variance="own", progress=False)
    assert {row.covariance for row in fitted.bits_per_dim(images(2), steps=3, progress=False).rows} >= {"spectral"}


def test_spectra_are_stored_and_found_again(fitted, tmp_path):
    fitted.save(tmp_path / "b")
    again = optcov.load(tmp_path / "b")
    assert again.spectra.tensors().keys() == fitted.spectra.tensors().keys()
    for name, tensor in fitted.spectra.tensors().items():
        assert torch.equal(again.spectra.tensors()[name], tensor)
    assert again.identity() == fitted.identity()
    assert "spectra" in fitted.identity()


def test_another_schedule_asks_for_the_same_noise_level(fitted):
    linear = Schedule.linear()
    t = 400
    native = float(fitted.schedule.time_at(linear.log_snr(t).reshape(1))[0])
    moved = fitted.with_schedule(linear).spectrum("npr").at(t)
    torch.testing.assert_close(moved, fitted.spectrum("npr").at(native), rtol=1e-6, atol=0)


def test_a_new_head_takes_its_old_correlation_away(fitted):
    replaced = fitted.with_heads({"npr": small_head(5)}, fitted.fingerprint)
    assert set(replaced.spectra.names) == {"residual", "sn"}
    with pytest.raises(BundleError, match="there is no spectrum 'npr'"):
        replaced.reverse_process("CNPR-DDPM")
    with pytest.raises(BundleError, match="has no spectra of its residuals"):
        small_bundle().reverse_process("CNPR-DDPM")


TIMES = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"power/npr": torch.ones(3, 1, 8, 8)}, "lack their times"),
        ({"times": TIMES, "power/npr": torch.ones(3, 1, 8, 8), "extra": TIMES}, "unknown .'extra'"),
        ({"times": TIMES.flip(0), "power/npr": torch.ones(3, 1, 8, 8)}, "must ascend"),
        ({"times": TIMES, "power/npr": torch.zeros(3, 1, 8, 8)}, "not positive and finite"),
        ({"times": TIMES, "power/npr": torch.full((3, 1, 8, 8), torch.nan)}, "not positive and finite"),
        ({"times": TIMES, "power/npr": torch.ones(2, 1, 8, 8)}, "one row of floating-point powers for each of 3 times"),
        ({"times": TIMES, "power/npr": torch.ones(3, 1, 8, 9)}, r"have bands \(1, 8, 9\), but data"),
        ({"times": TIMES, "power/npr": torch.ones(3, 1, 8, 65)}, "more than 64 bands"),
        ({"times": TIMES, "power/npr": torch.ones(3, 1, 8, 8), "channels": torch.ones(1, 1) * 2}, "orthogonal"),
        ({"times": 2 * TIMES, "power/npr": torch.ones(3, 1, 8, 8)}, "time"),
        ({"times": TIMES}, "without a power"),
    ],
)
def test_a_file_of_spectra_that_is_none_is_refused(tensors, message, tmp_path):
    small_bundle().save(tmp_path / "b")
    storage.write_tensors(tmp_path / "b" / SPECTRA, tensors)
    with pytest.raises(BundleError, match=message):
        optcov.load(tmp_path / "b")


def test_long_axes_are_stored_in_bands_each_with_a_frequency_of_its_own():
    for n in (8, 64, 65, 100, 256, 1024):
        band = bands_of(n)
        assert torch.unique(band).tolist() == list(range(min(n, MOST_BANDS)))
        assert bool((band.diff() >= 0).all())
    power = torch.rand(2, 3, 100, 70) + 0.1
    assert banded(power, (3, 100, 70)).shape == (2, *band_shape((3, 100, 70)))
    whole = unbanded(banded(power, (3, 100, 70)), (3, 100, 70))
    assert whole.shape == power.shape
    torch.testing.assert_close(whole.mean(), power.mean(), rtol=1e-4, atol=0)
    assert torch.equal(whole[..., :30, :30], power[..., :30, :30])


def test_channels_that_vary_together_are_mixed_apart():
    """Noise of known spectra in rotated channels: the mixture undoes the rotation, and the powers come back."""
    schedule, generator = Schedule.vp_sde(), torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q.contiguous()
    level = torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)
    across = 2.0 / (1 + torch.arange(8, dtype=torch.float64))
    meter, forward, D = SpectrumMeter((3, 8, 8)), ForwardProcess(schedule), cosine_matrix(8)
    for t in (0.3, 0.6, 0.9):
        y = torch.randn(4000, 3, 8, 8, generator=generator, dtype=torch.float64)
        y = y * (level[:, None, None] * across[:, None] * across).sqrt()
        residual = torch.einsum("ca,bchw->bahw", turn, D.mT @ y @ D)
        x_0 = torch.zeros(4000, 3, 8, 8, dtype=torch.float64)
        signal, spread = forward.levels(t)
        factor = signal / (signal.square() + spread.square()).sqrt()  # of noise in the velocity, with x_t at hand
        prediction = Prediction.of(NoisePrediction(x_0), x_0, t, signal, spread)
        noise = residual * factor / (factor.square() + spread.square() / (signal.square() + spread.square()))
        clean = -noise * spread / signal
        meter.note(t, {k: v / 4000 for k, v in meter.sums(Example(prediction, clean, noise, TIMES, forward)).items()})
    spectra = meter.spectra(schedule)
    assert torch.allclose((spectra.channels @ turn.mT).abs(), torch.eye(3, dtype=torch.float64), atol=0.05)
    found = spectra.powers["residual"][1].double()
    ratio = found[:, 0, 0] / found[2, 0, 0]
    torch.testing.assert_close(ratio, level / level[2], rtol=0.2, atol=0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (3, 16, 16), (256,)])
def test_nothing_is_kept_for_pairs_of_pixels(shape):
    schedule, pixels = Schedule.vp_sde(), math.prod(shape)
    channels = shape[0] if len(shape) > 1 else 1
    meter, forward = SpectrumMeter(shape, {"npr": None}), ForwardProcess(schedule)
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    for t in (0.3, 0.6):
        said = NoisePrediction(torch.zeros_like(x), {"npr": torch.ones_like(x)})
        prediction = Prediction.of(said, x, t, *forward.levels(t))
        meter.note(t, meter.sums(Example(prediction, x, x, TIMES, forward)))
        for mean in meter._means[t].values():
            assert mean.numel() <= channels * pixels  # pairs of channels at each frequency
    for name, stored in meter.spectra(schedule).tensors().items():
        assert stored.numel() <= (channels**2 if name == "channels" else 2 * pixels)


def test_many_times_are_stored_as_a_few_smooth_ones():
    schedule = Schedule.vp_sde()
    meter, generator = SpectrumMeter((1, 4, 4)), torch.Generator().manual_seed(0)
    exact = torch.rand(1, 1, 4, 4, dtype=torch.float64) + 0.5
    for t in torch.linspace(0.01, 1, 100).tolist():
        luck = torch.randn(96, 1, 4, 4, generator=generator, dtype=torch.float64).square().mean(0, keepdim=True)
        meter.note(t, {"residual": luck * exact})
    stored = meter.spectra(schedule)
    assert len(stored.times) == STORED_TIMES
    middle = stored.powers["residual"][8:24].double() / exact
    assert float((middle - 1).abs().max()) < 0.12  # a single time of 96 images is off by up to 0.5


def test_times_of_a_discrete_schedule_are_stored_as_such():
    meter = SpectrumMeter((1, 4, 4))
    for t in range(1, 1001, 20):
        meter.note(float(t), {"residual": torch.ones(1, 1, 4, 4, dtype=torch.float64)})
    stored = meter.spectra(Schedule.linear())
    assert len(stored.times) > STORED_TIMES / 2
    assert bool((stored.times == stored.times.round()).all())
    stored.check_fits((1, 4, 4), Schedule.linear())


def test_a_time_without_signal_has_a_spectrum_too():
    flow, meter = Schedule.flow(), SpectrumMeter((1, 4, 4))
    for t in torch.linspace(0.01, 1, 50, dtype=torch.float64).tolist():
        meter.note(t, {"residual": torch.full((1, 1, 4, 4), 1 + t, dtype=torch.float64)})
    stored = meter.spectra(flow)
    assert float(stored.times[-1]) == 1.0
    at = stored.function("residual", (1, 4, 4), flow, flow).at
    assert float(at(1.0).mean()) == pytest.approx(2.0, rel=0.05)
    assert float(at(0.5).mean()) == pytest.approx(1.5, rel=0.05)


def test_parabolas_pass_through_what_is_one():
    levels = torch.linspace(-5, 5, 30, dtype=torch.float64)
    values = 3 + levels - 0.2 * levels.square()
    torch.testing.assert_close(local_fit(levels, values, levels, 0.5, 2), values, rtol=1e-6, atol=1e-6)


class Counted:
    """How many images a network was asked about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.images, original = 0, HeadedNetwork.features

        def features(network: HeadedNetwork, x_t: Tensor, *others: object, **condition: Tensor) -> object:
            self.images += len(x_t)
            return original(network, x_t, *others, **condition)  # type: ignore[arg-type]

        monkeypatch.setattr(HeadedNetwork, "features", features)


def test_a_plan_says_how_many_evaluations_it_makes(monkeypatch):
    counted = Counted(monkeypatch)
    settings = FitSettings(images=32, measure_images=4, times=12, calibration_samples=64, batch_size=8)
    plan = FitPlan(small_bundle(), images(), ("sn", "npr"), settings)
    plan.run(None, progress=False)
    assert counted.images == plan.evaluations == 1 + 32 + 12 * 4 + 64


@pytest.mark.parametrize("heads", [("sn", "npr"), ("sn", "npr", "ocm")])
def test_all_heads_together_take_the_evaluations_of_npr_alone(heads):
    assert (
        FitPlan(small_bundle(), images(), heads).evaluations == FitPlan(small_bundle(), images(), ("npr",)).evaluations
    )


def test_a_fit_of_the_default_settings_makes_at_most_16000_evaluations():
    many = torch.zeros(6000, *SHAPE, dtype=torch.uint8)
    plan = FitPlan(small_bundle(), many)
    assert len(plan.grid) == 100
    assert plan.evaluations == 1 + 4096 + 100 * 96 + 2048 <= 16_000


@pytest.mark.parametrize("budget", [300, 1000, 5000, 40_000])
def test_a_budget_of_evaluations_is_kept(budget):
    many = torch.zeros(40_000, *SHAPE, dtype=torch.uint8)
    plan = FitPlan(small_bundle(), many, settings=FitSettings(evaluations=budget))
    assert 0.6 * budget <= plan.evaluations <= budget + 65


def test_an_estimate_says_what_a_fit_takes():
    plan = FitPlan(small_bundle(), images(), settings=FitSettings())
    found = plan.estimate()
    assert found.evaluations == plan.evaluations
    assert found.seconds > 0
    assert f"makes {plan.evaluations:,} network evaluations, about " in str(found)


def test_a_budget_that_is_none_is_refused():
    with pytest.raises(ValueError, match="evaluations = 10 are too few for a fit; use 256 or more"):
        FitPlan(small_bundle(), images(), settings=FitSettings(evaluations=10))


def test_spectra_of_another_shape_are_refused():
    spectra = Spectra(TIMES, {"npr": torch.ones(3, 2, 8, 8)})
    with pytest.raises(BundleError, match="but data of shape"):
        small_bundle().with_spectra(spectra)


def test_a_fit_that_was_stopped_goes_on_with_its_spectra(tmp_path, monkeypatch):
    import optcov.fitting.fit as module

    whole = optcov.fit(small_bundle(), images(), work=tmp_path / "a", **QUICK)
    real = module.numbers_per_time
    monkeypatch.setattr(
        module, "numbers_per_time", lambda records: (list(records), (_ for _ in ()).throw(KeyboardInterrupt))
    )
    monkeypatch.setattr(module, "smoothed", lambda found, schedule: next(found[1]))
    with pytest.raises(KeyboardInterrupt):
        optcov.fit(small_bundle(), images(), work=tmp_path / "b", **QUICK)
    monkeypatch.undo()
    assert module.numbers_per_time is real
    counted = Counted(monkeypatch)
    again = optcov.fit(small_bundle(), images(), work=tmp_path / "b", **QUICK)
    assert counted.images == 1 + 32 + 64  # nothing is measured twice
    for name, power in whole.spectra.powers.items():
        torch.testing.assert_close(again.spectra.powers[name].float(), power.float(), rtol=2e-3, atol=0)


def test_a_pipeline_says_that_it_cannot_hold_a_spectrum(fitted):
    from diffusers import DDPMPipeline, DDPMScheduler

    bundle = fitted.with_schedule("linear")
    with pytest.raises(ValueError, match=r"CNPR-DDPM correlates pixels by a spectrum.*sample by bundle\.sample"):
        optcov.attach(DDPMPipeline(bundle.unet, DDPMScheduler()), bundle, method="CNPR-DDPM")
