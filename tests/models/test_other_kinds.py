"""Models and data that are a little unlike the usual ones: each is taken rightly, or refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optcov
import tiny_models as tiny
from command_line import CommandLine, run
from optcov import Schedule
from optcov.bundle import Bundle, Sampler
from optcov.bundle.drawing import draw_to

QUICK: dict[str, Any] = {
    "images": 8, "measure_images": 2, "times": 3, "calibration_samples": 0, "progress": False, "batch_size": 4,
    "half": False,
}  # fmt: skip
OPTIONS = ["--images", 8, "--measure-images", 2, "--times", 3, "--calibration-samples", 0, "--batch-size", 4]


def captioned(count: int = 12) -> tuple[Tensor, list[str]]:
    return tiny.images(count), (tiny.CAPTIONS * 3)[:count]


def without(name: str, *parts: str) -> Any:
    pipeline = tiny.pipeline(name)
    for part in parts:
        setattr(pipeline, part, None)
    return pipeline


@pytest.mark.parametrize(
    ("name", "part"),
    [("sd", "text_encoder"), ("sd", "tokenizer"), ("sd3", "text_encoder"), ("flux", "text_encoder_2")],
)
def test_captions_need_the_encoders_of_the_pipeline(name: str, part: str) -> None:
    with pytest.raises(ValueError, match=rf"this \w+ has no {part}, so that it cannot encode captions; load the whole"):
        optcov.fit(without(name, part), captioned(), **QUICK)


def test_encoded_captions_need_no_encoders() -> None:
    texts = torch.randn(12, 5, 8, generator=torch.Generator().manual_seed(0))
    pipeline, told = without("sd", "text_encoder", "tokenizer"), {"encoder_hidden_states": texts}
    bundle = optcov.fit(pipeline, torch.zeros(12, 4, 8, 8), condition=told, **QUICK)
    assert not bundle.empty_condition
    drawn = bundle.sample(2, condition={"encoder_hidden_states": texts[:2]}, steps=2, progress=False)
    assert drawn.shape == (2, 4, 8, 8)


def test_captions_may_be_an_array_of_texts() -> None:
    from optcov.fitting.fit import FitPlan
    from optcov.fitting.settings import FitSettings

    settings = FitSettings(images=8, batch_size=4, measure_images=2, times=3, calibration_samples=0)
    plan = FitPlan(tiny.pipeline("sd"), (tiny.images(4), np.array(tiny.CAPTIONS)), settings=settings, progress=False)
    assert len(plan.train) == 4
    with pytest.raises(ValueError, match="the caption 'a shoe' is one text; give a list with one for each image"):
        FitPlan(tiny.pipeline("sd"), (tiny.images(4), "a shoe"), settings=settings, progress=False)


def test_texts_for_a_model_of_classes_are_not_left_out_in_silence() -> None:
    with pytest.raises(ValueError, match="DiTPipeline is told a class of each image, but images has texts; number the"):
        optcov.fit(tiny.pipeline("dit"), (tiny.images(12), ["3"] * 12), **QUICK)


def test_complex_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="labels are complex numbers; number the classes from 0"):
        optcov.fit(tiny.pipeline("dit"), (tiny.images(12), torch.zeros(12, dtype=torch.complex64)), **QUICK)


def test_captions_are_not_left_out_of_a_bound_in_silence() -> None:
    bundle = optcov.fit(tiny.pipeline("sd"), captioned(), **QUICK)
    options: dict[str, Any] = {"steps": 2, "methods": ["NPR-DDPM"], "progress": False}
    with pytest.raises(ValueError, match="images has captions, but StableDiffusionPipeline holds nothing that encodes"):
        bundle.bits_per_dim(captioned(2), **options)
    assert bundle.bits_per_dim(tiny.images(2), **options).of("npr", 2).mean > 0


def test_commands_for_captions_say_what_they_do_and_write_nothing_if_they_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_folder(tmp_path / "pictures", tiny.CAPTIONS, 12)
    for name in ("sd", "flux"):
        tiny.pipeline(name).save_pretrained(tmp_path / name)
        capsys.readouterr()
        run("fit", tmp_path / name, tmp_path / "pictures", "--out", tmp_path / f"{name}-bundle", *OPTIONS)
        assert "Loading" not in capsys.readouterr().err
    optcov_, few = CommandLine(capsys), ["--images", 2, "--train-images", 2, "--times", 3, "--steps", 3]
    said = optcov_("bpd", tmp_path / "sd-bundle", tmp_path / "pictures", *few, "--out", tmp_path / "table")
    assert said.code == 0
    assert "captions are left out, since sd-bundle holds nothing that encodes them" in " ".join(said.err.split())
    before = sorted(tmp_path.iterdir())
    for command in (["sample"], ["bpd", tmp_path / "pictures", *few], ["trajectory", tmp_path / "pictures"]):
        said = optcov_(command[0], tmp_path / "flux-bundle", *command[1:], "--out", tmp_path / "drawn")
        assert said.code == 2
        assert "needs the condition 'encoder_hidden_states', and none is told; from Python pass" in said.err
        assert sorted(tmp_path.iterdir()) == before


class Net(nn.Module):
    """A network of somebody's own that returns its prediction in some way."""

    def __init__(self, wrap: Any = lambda output: output) -> None:
        super().__init__()
        self.wrap, self.out, self.told = wrap, nn.Conv2d(1, 1, 3, padding=1), []

    def forward(self, x: Tensor, time: Tensor) -> Any:
        self.told.append(time)
        return self.wrap(self.out(x))


def points() -> Tensor:
    return torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize(("scheduler", "last"), [("DDPMScheduler", 999.0), ("FlowMatchEulerDiscreteScheduler", 1000.0)])
def test_a_scheduler_of_diffusers_tells_any_network_times_as_diffusers_does(scheduler: str, last: float) -> None:
    import diffusers

    net = Net()
    bundle = optcov.fit((net, getattr(diffusers, scheduler)()), points(), layer="out", **QUICK)
    bundle.sample(1, steps=2, method="DDIM", progress=False)
    assert float(torch.cat(net.told).max()) == last


@pytest.mark.parametrize(
    "wrap",
    [lambda output: [output], lambda output: (output, 3), lambda output: {"sample": output}],
    ids=["list", "tuple", "dictionary"],
)
def test_a_network_may_return_its_prediction_as_the_first_of_several_or_as_sample(wrap: Any) -> None:
    bundle = optcov.fit((Net(wrap), Schedule.flow(), "flow_prediction"), points(), layer="out", **QUICK)
    assert bundle.sample(1, steps=2, progress=False).isfinite().all()


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [(lambda _: None, "NoneType"), (lambda output: {"eps": output}, "dict"), (lambda _: (3,), "int")],
    ids=["nothing", "another name", "a number"],
)
def test_what_is_no_prediction_is_named(wrap: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"Net returns a {kind}, in which no prediction is found; return a tensor"):
        optcov.fit((Net(wrap), Schedule.flow(), "flow_prediction"), points(), layer="out", **QUICK)


def test_a_network_that_fails_at_some_times_only_is_named() -> None:
    class Late(Net):
        def forward(self, x: Tensor, time: Tensor) -> Any:
            return torch.where(time[:, None, None, None] < 0.5, torch.nan, super().forward(x, time))

    with pytest.raises(ValueError, match="Late returns NaN, infinity or numbers beyond all bounds at some times"):
        optcov.fit((Late(), Schedule.flow(), "flow_prediction"), points(), layer="out", **QUICK)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "sd3",
            lambda: tiny.images(12, 18),
            r"patches of 2 x 2, but the data has latents of 9 x 9; .* sides 4 divides",
        ),
        ("flux", lambda: tiny.images(12, 18), r"patches of 2 x 2, but the data has latents of 9 x 9; .* sides 4 divid"),
        (
            "sd",
            lambda: torch.zeros(12, 3, 16, 16),
            "takes latents of 4 channels, but the data has 3; give 8-bit images",
        ),
        ("sd", lambda: torch.zeros(12, 4, 16, 16, dtype=torch.uint8), "images of 4 channels, but .* takes 3; convert"),
    ],
    ids=["sd3", "flux", "floats", "rgba"],
)
def test_pictures_that_do_not_fit_are_refused_with_those_that_would(name: str, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optcov.fit(tiny.pipeline(name), (data(), tiny.CAPTIONS * 3), **QUICK)


def test_a_mean_and_a_deviation_for_each_channel_of_latents_are_those_of_diffusers() -> None:
    from optcov.bundle.latents import Codec

    vae = tiny.seeded(lambda: tiny.vae(latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0]))
    mean, std = (torch.tensor(vae.config[name]).view(1, 4, 1, 1) for name in ("latents_mean", "latents_std"))
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # as StableDiffusionXLPipeline does it
        expected = vae.decode(latents * std / vae.config.scaling_factor + mean).sample.clamp(-1, 1)
        image = torch.rand(1, 3, 16, 16) * 2 - 1
        known = (vae.encode(image).latent_dist.mode() - mean) * vae.config.scaling_factor / std
    torch.testing.assert_close(Codec(vae).decode(latents), expected)
    torch.testing.assert_close(Codec(vae).encode(image), known)


def test_an_autoencoder_that_overflows_in_half_precision_runs_in_float32() -> None:
    from optcov.bundle.latents import Codec

    vae = tiny.seeded(tiny.vae).half()
    vae.decoder.conv_in.weight.data.fill_(6e4)  # beyond float16 in a sum, and nothing that a normalisation minds
    assert Codec(vae).decode(torch.ones(1, 4, 8, 8)).isfinite().all()
    assert {weight.dtype for weight in vae.parameters()} == {torch.float16}  # it is stored as it was


@pytest.mark.parametrize("images", [torch.zeros(1, 1, 16, 16), torch.zeros(1, 3, 16, 16, dtype=torch.uint8)])
def test_images_that_cannot_be_encoded_are_named(images: Tensor) -> None:
    from optcov.bundle.latents import Codec

    with pytest.raises(ValueError, match=r"images are \(B, 3, H, W\) in \[-1, 1\], not torch"):
        Codec(tiny.vae()).encode(images)


@pytest.fixture(scope="module")
def stable_diffusion() -> Bundle:
    return optcov.fit(tiny.pipeline("sd"), captioned(), **QUICK)


def test_a_bundle_of_another_size_of_stable_diffusion_is_not_attached(stable_diffusion: Bundle) -> None:
    message = "the network of this StableDiffusionXLPipeline is told encoder_hidden_states of 16, text_embeds of 8"
    with pytest.raises(ValueError, match=message):
        optcov.attach(tiny.pipeline("sdxl"), stable_diffusion)


def test_images_of_another_decoder_are_not_added_to_those_of_the_first(
    stable_diffusion: Bundle, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        decoder = tiny.vae()
    other = replace(stable_diffusion, decoder=decoder)
    for decode in (True, False):
        options: dict[str, Any] = {"steps": 2, "progress": False, "decode": decode, "work": tmp_path / str(decode)}
        first = stable_diffusion.sample(1, **options)
        if decode:
            with pytest.raises(ValueError, match="the decoder changed"):
                other.sample(1, **options)
        else:  # latents are what they are
            assert torch.equal(other.sample(1, **options), first)
    draw_to(Sampler(stable_diffusion, "DDIM", 2), tmp_path / "files", 1)
    with pytest.raises(ValueError, match="the decoder changed"):
        draw_to(Sampler(other, "DDIM", 2), tmp_path / "files", 2)


def test_a_pipeline_with_a_head_is_not_fitted_again(stable_diffusion: Bundle) -> None:
    attached = optcov.attach(tiny.pipeline("sd"), stable_diffusion)
    with pytest.raises(ValueError, match=r"UNet2DConditionModelWithHead, .*; give the pipeline as it was before"):
        optcov.fit(attached, captioned(), **QUICK)


def test_a_compiled_network_is_taken_as_the_one_that_it_was_made_from(stable_diffusion: Bundle) -> None:
    pipeline = tiny.pipeline("sd")
    pipeline.unet = torch.compile(pipeline.unet, backend="eager")
    again = optcov.fit(pipeline, captioned(), **QUICK)
    assert again.fingerprint == stable_diffusion.fingerprint
    assert type(optcov.attach(pipeline, again).unet).__name__ == "UNet2DConditionModelWithHead"


def test_a_pipeline_that_tells_no_class_is_told_one() -> None:
    from diffusers import DDPMPipeline, DDPMScheduler

    model = (tiny.seeded(tiny.labelled_unet), DDPMScheduler())
    bundle = optcov.fit(model, (tiny.images(12, 8), torch.arange(12) % 4), **QUICK)
    with pytest.raises(ValueError, match="classes and none that stands for no class; pass one, as label=0"):
        optcov.attach(DDPMPipeline(*model), bundle)
    with pytest.raises(ValueError, match=r"label = 99 is no class of UNet2DModel; choose 0 to "):
        optcov.attach(DDPMPipeline(*model), bundle, label=99)
    assert optcov.attach(DDPMPipeline(*model), bundle, label=2).unet.config.class_label == 2


def test_the_shift_of_a_solver_for_flow_matching_is_kept() -> None:
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

    bundle, flow = optcov.fit(tiny.pipeline("sd3"), captioned(), **QUICK), {"prediction_type": "flow_prediction"}
    pipeline = tiny.pipeline("sd3")
    pipeline.scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, **flow)
    expected = FlowMatchEulerDiscreteScheduler(shift=5.0)
    for scheduler in (optcov.attach(pipeline, bundle, "DDIM").scheduler, expected):
        scheduler.set_timesteps(4)
    torch.testing.assert_close(pipeline.scheduler.sigmas, expected.sigmas)


def test_images_without_a_class_beside_others_keep_what_the_head_says_of_them() -> None:
    bundle = optcov.fit(tiny.pipeline("dit"), (tiny.images(12), torch.arange(12)), **QUICK)
    pipeline = optcov.attach(tiny.pipeline("dit"), bundle, "NPR-DDIM")
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    scheduler, told = pipeline.scheduler, {"class_labels": torch.tensor([1, 1000])}
    scheduler.set_timesteps(4)
    t = scheduler.timesteps[1]
    with torch.no_grad():
        output = pipeline.transformer(x, timestep=t.expand(2), **told).sample
    found = scheduler.step(output[:, :4], t, x).pred_original_variance
    expected = bundle.posterior(x, int(t) + 1, "npr", **told).variance
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
