"""Fitting, sampling and scoring as single calls of Python: what they return, and what they refuse at once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

import optcov
from close_outputs import assert_close_outputs
from optcov import METHODS, Schedule, Trajectory
from optcov.bundle.sampler import Sampler
from optcov.networks import HeadedNetwork

QUICK = {"images": 32, "measure_images": 4, "times": 4, "calibration_samples": 64, "batch_size": 8, "progress": False}


def small_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        8,
        1,
        1,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    ).eval()


def some_images(count: int = 80) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.fixture(scope="module")
def bundle() -> optcov.Bundle:
    return optcov.fit(DDPMPipeline(small_unet(), DDPMScheduler()), some_images(), **QUICK)


def test_a_pipeline_in_memory_is_fitted_by_one_call(bundle):
    assert set(bundle.heads) == {"sn", "npr"}
    assert bundle.numbers is not None
    assert set(bundle.provenance["calibration"]) == {"sn", "npr"}
    assert bundle.schedule.steps == 1000


def test_what_is_fitted_can_be_saved_loaded_and_sampled(bundle, tmp_path):
    bundle.save(tmp_path / "bundle")
    again = optcov.load(tmp_path / "bundle")
    options = {"method": "NPR-DDIM", "steps": 4, "seed": 3, "progress": False}
    assert_close_outputs(bundle.sample(3, **options), again.sample(3, **options), 1e-4)  # rounding grows by steps


@pytest.mark.parametrize("form", ["unet and schedule", "directory", "bundle"])
def test_other_forms_of_the_same_model_give_the_same_heads(bundle, tmp_path, form):
    model: object = (small_unet(), Schedule.linear())
    if form == "directory":
        DDPMPipeline(small_unet(), DDPMScheduler()).save_pretrained(tmp_path)
        model = tmp_path
    elif form == "bundle":
        model = bundle
    again = optcov.fit(model, some_images(), **QUICK)
    for name, head in bundle.heads.items():
        for key, value in head.state_dict().items():
            torch.testing.assert_close(again.heads[name].state_dict()[key], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["uint8", "numpy", "channels last", "with labels", "set"])
def test_images_come_in_any_usual_form(kind):
    levels = ((some_images(40) + 1) * 127.5).round().to(torch.uint8)
    data: object = {
        "uint8": levels,
        "numpy": levels.numpy(),
        "channels last": levels.permute(0, 2, 3, 1).numpy(),
        "with labels": (levels, torch.arange(40) % 3),
        "set": optcov_set(levels),
    }[kind]
    found = optcov.fit((small_unet(), Schedule.linear()), data, heads=["npr"], **{**QUICK, "images": 8})
    assert list(found.heads) == ["npr"]


def optcov_set(levels: torch.Tensor):
    from optcov.data import ImageSet

    return ImageSet(levels)


def test_an_image_does_not_depend_on_the_batch_it_is_drawn_in(bundle):
    options = {"method": "NPR-DDPM", "steps": 3, "progress": False}
    together, apart = bundle.sample(5, batch_size=5, **options), bundle.sample(5, batch_size=2, **options)
    assert_close_outputs(together, apart)
    assert not torch.allclose(together, bundle.sample(5, seed=1, **options))


def test_a_posterior_may_probe_the_network_instead_of_a_head(bundle):
    x_t = torch.zeros(2, *bundle.image_shape)
    with pytest.raises(ValueError, match=r"has no head 'ocm'.*or pass ocm_probes=8 .optcov sample --ocm-probes 8"):
        bundle.posterior(x_t, 500, "ocm")
    assert bundle.posterior(x_t, 500, "ocm", ocm_probes=2).variance.shape == x_t.shape


@pytest.mark.parametrize("method", ["NPR-DDPM", "SN-DDPM", "A-DDPM", "DDPM, beta", "CNPR-DDPM"])
def test_bits_per_dim_are_those_of_the_bound(bundle, method):
    """Numbers per time are the bundle's, and never those of the images that are scored."""
    images = some_images(6)
    score = bundle.bits_per_dim(images, steps=[5], seed=2, progress=False)
    process = bundle.reverse_process(method)
    expected = optcov.elbo(process, images, Trajectory.even(bundle.schedule, 5), seed=2).bits_per_dim().mean()
    assert score.of(METHODS[method].covariance, 5).mean == pytest.approx(float(expected), rel=1e-6)


def test_a_long_call_goes_on_from_its_work_directory(bundle, tmp_path, monkeypatch):
    options = {"method": "NPR-DDPM", "steps": 3, "batch_size": 2, "progress": False}
    first = bundle.sample(4, work=tmp_path / "drawn", **options)
    scored = bundle.bits_per_dim(some_images(4), steps=3, work=tmp_path / "scored", progress=False)
    assert_close_outputs(first, bundle.sample(4, **options))
    (tmp_path / "drawn" / "images-000002-000003.safetensors").unlink()
    calls: list[int] = []
    drawn = Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda self, indices: calls.extend(indices) or drawn(self, indices))
    assert_close_outputs(bundle.sample(4, work=tmp_path / "drawn", **options), first)
    assert calls == [2, 3]  # those that were missing alone
    monkeypatch.setattr(HeadedNetwork, "forward", None)
    again = bundle.bits_per_dim(some_images(4), steps=3, work=tmp_path / "scored", progress=False)
    assert again.to_json() == scored.to_json()
    with pytest.raises(ValueError, match="the seed changed from 0 to 1"):
        bundle.sample(4, work=tmp_path / "drawn", seed=1, **options)


def test_a_score_prints_plots_and_is_data(bundle, tmp_path):
    score = bundle.bits_per_dim(some_images(4), steps=[3, 5], methods=["NPR-DDPM", "A-DDPM"], progress=False)
    assert score.lengths == [3, 5]
    assert "NPR-DDPM" in str(score)
    assert "even times" not in str(score)  # there are no others to tell them from
    assert "K = 5" in str(score)
    assert "<table>" in score._repr_html_()
    assert {row["covariance"] for row in score.to_json()["rows"]} == {"npr", "analytic"}
    assert score.plot(tmp_path / "bits.png").stat().st_size > 1000


def test_the_posterior_is_that_of_the_reverse_process(bundle):
    x_t = some_images(2)
    known = bundle.posterior(x_t, 300)
    expected = bundle.reverse_process("NPR-DDPM").posterior(x_t, 300)
    assert_close_outputs(known.mean, expected.mean)
    assert_close_outputs(known.variance, expected.variance)


def test_a_fit_that_was_stopped_goes_on_in_its_work_directory(tmp_path, monkeypatch):
    from optcov.fitting import fit as module

    arguments = ((small_unet(), Schedule.linear()), some_images(40))
    calls = []
    real = module.interpolation_error
    monkeypatch.setattr(module, "interpolation_error", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optcov.fit(*arguments, heads=["npr"], work=tmp_path, **QUICK)
    monkeypatch.setattr(module, "interpolation_error", real)
    measure = sys.modules["optcov.fitting.measure"]
    at = measure._measure_at
    monkeypatch.setattr(measure, "_measure_at", lambda *a: calls.append(a) or at(*a))
    optcov.fit(*arguments, heads=["npr"], work=tmp_path, **QUICK)
    assert not calls  # every time had been measured
    with pytest.raises(ValueError, match="belongs to another run: the seed changed from 0 to 1"):
        optcov.fit(*arguments, heads=["npr"], work=tmp_path, seed=1, **QUICK)


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("nowhere", None, {}, "no such file or directory: nowhere"),
        (3, None, {}, "model = '3' is not a model that heads can be fitted on; give a directory, a bundle"),
        (None, [1, 2], {}, "data of type list is not known; give a path, a tensor"),
        (None, torch.zeros(4, 3, 8, 8), {}, r"takes data of shape \(1, 8, 8\), but data .* has \(3, 8, 8\)"),
        (None, torch.full((40, 1, 8, 8), float("nan")), {}, "NaN or infinite"),
        (
            None,
            255 * torch.rand(40, 1, 8, 8),
            {},
            r"the data runs from .* to 25[45].*, outside the data range .*; scale it",
        ),
        (None, None, {"heads": ["nprr"]}, "unknown head 'nprr'; choose among"),
        (None, None, {"heads": ["sn_full"]}, r"unknown head 'sn_full'; choose among .*\bnpr\b(?!.*sn_full)"),
        (None, None, {"measure_images": 10**15}, "measure_images = 1000000000000000 would never end"),
        (None, None, {"score_steps": "x"}, "score_steps = 'x' must be a whole number"),
        (None, None, {"image": 4}, "a fit has no setting 'image'; it has images"),
        (None, None, {"images": 0}, "images = 0 must be a whole number of at least 1"),
        (None, None, {"measure_images": 1}, "use measure_images of 2 or more"),
        (None, None, {"kind": "cubic"}, "unknown kind of head 'cubic'"),
        (None, None, {"schedule": "linear"}, "knows its schedule"),
    ],
)
def test_bad_arguments_of_a_fit_are_refused_before_any_long_work(model, data, options, message, monkeypatch):
    monkeypatch.setattr("optcov.fitting.fit.fit_closed_form", lambda *_: pytest.fail("the fit began"))
    given = (small_unet(), Schedule.linear()) if model is None else model
    with pytest.raises(ValueError, match=message):
        optcov.fit(given, some_images(40) if data is None else data, **{**QUICK, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.sample(0), "n = 0 and batch_size = 64 must be positive"),
        (lambda b: b.sample(2, steps=0), "steps = 0 is not a positive whole number"),
        (lambda b: b.sample(2, method="NPR"), "unknown method 'NPR'"),
        (lambda b: b.sample(2, method="Improved DDPM"), "has no head 'range'"),
        (lambda b: b.sample(2, condition={"class_labels": torch.zeros(3)}), "each of 2 images"),
        (lambda b: b.bits_per_dim(np.zeros((2, 1, 9, 9))), r"takes data of shape \(1, 8, 8\)"),
        (lambda b: b.bits_per_dim(some_images(2), steps=1), "steps = 1 must be numbers of steps of at least 2"),
        (lambda b: b.bits_per_dim(some_images(2), methods=["NPR-DDIM"]), "no finite variational bound.*NPR-DDPM"),
        (lambda b: b.trajectory(5, kind=[]), "unknown kind of trajectory"),
        (lambda b: b.with_trajectories("Gotta Go Fast", []), "Gotta Go Fast has no covariance"),
        (lambda b: b.posterior(some_images(2), 300, class_labels=torch.tensor([0, 1])), "knows no classes"),
        (lambda b: b.posterior(some_images(2), 2000), "time 2000 is outside this schedule"),
        (lambda b: b.posterior(some_images(2), 300, "range"), "has no head 'range'"),
    ],
)
def test_bad_arguments_of_a_bundle_are_refused_by_name(bundle, call, message):
    with pytest.raises(ValueError, match=message):
        call(bundle)


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("diffusers", "matplotlib", "accelerate", "torch")
    code = f"import optcov, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_bundle_is_attached_to_a_pipeline_by_one_call(bundle):
    pipeline = DDPMPipeline(small_unet(), DDPMScheduler())
    assert optcov.attach(pipeline, bundle, method="NPR-DDIM") is pipeline
    images = pipeline(batch_size=1, num_inference_steps=3, output_type="np").images
    assert images.shape == (1, 8, 8, 1)


def test_the_network_of_a_fit_is_kept_bit_by_bit():
    unet = small_unet()
    before = {name: weight.clone() for name, weight in unet.state_dict().items()}
    fitted = optcov.fit((unet, Schedule.linear()), some_images(), heads=("npr",), **QUICK)
    assert all(torch.equal(fitted.unet.state_dict()[name], weight) for name, weight in before.items())
    rounded = optcov.fit((unet, Schedule.linear()), some_images(), heads=("npr",), half=True, **QUICK)
    assert not torch.equal(rounded.unet.conv_in.weight, before["conv_in.weight"])
    assert torch.equal(unet.conv_in.weight, before["conv_in.weight"])  # a copy was rounded


def test_data_that_looks_like_0_to_1_is_told_of(caplog):
    optcov.fit((small_unet(), Schedule.linear()), some_images(), heads=("npr",), **QUICK)
    assert not caplog.records
    optcov.fit((small_unet(), Schedule.linear()), some_images() / 2 + 0.5, heads=("npr",), **QUICK)
    assert ["scale it by 2 * x - 1" in record.message for record in caplog.records] == [True]


def test_a_network_with_an_adapter_is_refused_before_the_fit():
    unet = small_unet()
    unet.peft_config = {"default": object()}  # as add_adapter leaves it
    with pytest.raises(ValueError, match="has an adapter .* fuse it first"):
        optcov.fit((unet, Schedule.linear()), some_images(), **QUICK)


def test_a_score_and_a_posterior_are_asked_by_the_words_of_other_calls(bundle):
    score = bundle.bits_per_dim(some_images(4), steps=3, methods=["NPR-DDPM"], progress=False)
    assert score.of("NPR-DDPM", 3) == score.of("npr", 3)
    with pytest.raises(ValueError, match="knows no classes; leave the labels out"):
        bundle.posterior(some_images(2), 300, labels=1)
