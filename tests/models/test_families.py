"""Every family of models that people have, as a tiny random one: fit, save, load, sample, likelihood, attach."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import optcov
import optcov.solvers.multistep as solver
import tiny_models as tiny
from optcov.bundle import Bundle
from optcov.fitting import new_heads
from optcov.integrations import stepping
from optcov.integrations.diffusers import BridgeScheduler, FlowMatchBridgeScheduler
from optcov.solvers import BridgeNoise

STEPS = 4
WITH_CAPTIONS = ("sd", "sdxl", "pixart", "sd3", "flux")
LATENTS = ("ldm", "dit", *WITH_CAPTIONS)
GUIDED = ("dit", "sd", "sdxl", "pixart", "sd3")
QUICK: dict[str, Any] = {
    "images": 8, "measure_images": 2, "times": 3, "calibration_samples": 0, "progress": False, "batch_size": 4,
    "half": False,
}  # fmt: skip


@dataclass
class Family:
    """A tiny pipeline with the bundle that was fitted on it."""

    name: str
    bundle: Bundle
    condition: dict[str, Tensor]  # of two images

    def pipeline(self) -> Any:
        """A fresh pipeline with the same weights."""
        return tiny.pipeline(self.name)


def data_of(name: str) -> Any:
    pictures = tiny.images(12, 8 if name == "ddpm" else 16)
    if name in WITH_CAPTIONS:
        return pictures, tiny.CAPTIONS * 3
    return (pictures, torch.arange(12)) if name == "dit" else pictures


@pytest.fixture(scope="module", params=["ddpm", *LATENTS])
def family(request: pytest.FixtureRequest) -> Family:
    from optcov.checkpoints.opening import import_pipeline

    pipeline = tiny.pipeline(request.param)
    condition = {}
    if request.param in WITH_CAPTIONS:
        condition = import_pipeline(pipeline).words.encode(tiny.CAPTIONS[:2], (16, 16))
    if request.param == "dit":
        condition = {"class_labels": torch.tensor([1, 2])}
    return Family(request.param, optcov.fit(pipeline, data_of(request.param), **QUICK), condition)


def start(family: Family) -> Tensor:
    return torch.randn(2, *family.bundle.image_shape, generator=torch.Generator().manual_seed(1))


def draw(
    family: Family, pipeline: Any, noise: Tensor, monkeypatch: pytest.MonkeyPatch, guidance: float = 1.0
) -> Tensor:
    """What a pipeline draws from a given noise at the last time, before it is decoded."""
    from optcov.networks.calls import pack, unpack

    options: dict[str, Any] = {"num_inference_steps": STEPS, "output_type": "latent"}
    if family.name in GUIDED:
        options["guidance_scale"] = guidance
    if family.name in WITH_CAPTIONS:
        given = pack(noise) if family.name == "flux" else noise
        options |= {"prompt": tiny.CAPTIONS[:2], "height": 16, "width": 16, "latents": given}
        if family.name == "pixart":
            options |= {"use_resolution_binning": False, "clean_caption": False}
        found = torch.as_tensor(pipeline(**options).images)
        return unpack(found, *noise.shape[2:]) if family.name == "flux" else found
    # pipelines that neither take latents nor return them: look into their scheduler and their noise
    module = __import__(type(pipeline).__module__, fromlist=["randn_tensor"])
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: noise.clone())
    seen: list[Tensor] = []
    step = pipeline.scheduler.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        seen.append(made.prev_sample)
        return made

    monkeypatch.setattr(pipeline.scheduler, "step", watched)
    if family.name == "dit":
        pipeline(class_labels=[1, 2], **{**options, "output_type": "pt"})
    else:
        pipeline(batch_size=2, **{**options, "output_type": "np"})
    return seen[-1][:2]


def recorded_noises(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What our schedulers will draw, in order."""
    noises: list[Tensor] = []

    def kept(*args: Any, **kwargs: Any) -> Tensor:
        noises.append(torch.randn(*args, generator=kwargs["generator"]))
        return noises[-1]

    monkeypatch.setattr(stepping, "randn_tensor", kept)
    return noises


def of_two(family: Family, noise: Tensor) -> Tensor:
    """The noise of two images (2, C, H, W), as a pipeline drew it: Flux in tokens, others with guidance for four."""
    from optcov.networks.calls import unpack

    return unpack(noise, *family.bundle.image_shape[1:]) if family.name == "flux" else noise[:2]


def times_of(scheduler: Any) -> optcov.Trajectory:
    """The times that a scheduler visits, as ours."""
    if hasattr(scheduler, "sigmas"):
        return optcov.Trajectory([float(sigma) for sigma in scheduler.sigmas.double()[:-1].flip(0)])
    return optcov.Trajectory([int(t) + 1 for t in scheduler.timesteps.flip(0)])


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = float(expected.double().std())
    torch.testing.assert_close(found.double() / scale, expected.double() / scale, rtol=0, atol=tolerance)


def test_a_fit_is_saved_loaded_sampled_and_scored(family: Family, tmp_path: Path) -> None:
    bundle = family.bundle
    assert set(bundle.heads) == {"sn", "npr"}
    assert (bundle.data_range is None) == (family.name in LATENTS)
    bundle.save(tmp_path / "bundle")
    again = optcov.load(tmp_path / "bundle")
    options: dict[str, Any] = {"method": "NPR-DDIM", "steps": 3, "condition": family.condition, "progress": False}
    drawn = bundle.sample(2, **options)
    assert drawn.isfinite().all()
    close(again.sample(2, **options), drawn, 1e-4)
    score = again.bits_per_dim(
        drawn.clamp(-1, 1), steps=3, methods=["NPR-DDPM"], condition=family.condition, progress=False
    )
    assert torch.tensor(score.of("npr", 3).mean).isfinite()
    assert ("nats per latent dimension" in str(score)) == (family.name in LATENTS)
    assert ("bits/dim" in str(score)) != (family.name in LATENTS)


def test_latents_are_decoded_to_images(family: Family) -> None:
    options: dict[str, Any] = {"steps": 2, "condition": family.condition, "progress": False}
    if family.name not in LATENTS:
        with pytest.raises(ValueError, match="has no decoder"):
            family.bundle.sample(2, decode=True, **options)
        return
    images = family.bundle.sample(2, decode=True, **options)
    assert images.shape == (2, 3, 16, 16)
    assert float(images.abs().max()) <= 1


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_the_pipeline_draws_what_the_bundle_draws(
    family: Family, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guidance != 1 and family.name not in GUIDED:
        pytest.skip("it has no guidance")
    draws_the_same(family, family.bundle, "NPR-DDIM", guidance, monkeypatch)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_a_moment_about_zero_is_that_of_the_conditional_prediction(
    family: Family, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family.name not in GUIDED:
        pytest.skip("it has no guidance")
    network, one = family.bundle.network, {name: value[:1] for name, value in family.condition.items()}
    heads = new_heads(network, start(family)[:1], ["sn"], "conv", condition=one)
    fitted = {name: task.module for name, task in heads.items()}
    bundle = family.bundle.with_heads(fitted, family.bundle.fingerprint)
    assert bundle.heads["sn"].about == "zero"
    draws_the_same(family, bundle, "SN-DDIM", guidance, monkeypatch)


def draws_the_same(
    family: Family, bundle: Bundle, method: str, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = optcov.attach(family.pipeline(), bundle, method)
    noises = recorded_noises(monkeypatch)
    found = draw(family, pipeline, start(family), monkeypatch, guidance)
    assert len(noises) == STEPS - 1

    def noise(t: float, s: float) -> Tensor:
        return of_two(family, noises.pop(0))

    process = bundle.reverse_process(method, guidance=guidance)
    cap = bundle.noise_cap(method)
    shape = (2, *family.bundle.image_shape)
    expected = optcov.sample(
        process,
        times_of(pipeline.scheduler),
        shape,
        start=start(family),
        noise=noise,
        noise_cap=cap,
        condition=family.condition,
    )
    close(found, expected, 1e-4)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_without_noise_the_pipeline_draws_what_diffusers_draws(
    family: Family, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import DDIMScheduler

    if guidance != 1 and family.name not in GUIDED:
        pytest.skip("it has no guidance")
    theirs = family.pipeline()
    if family.bundle.schedule.discrete:
        clip = family.name not in LATENTS
        theirs.scheduler = DDIMScheduler.from_config(theirs.scheduler.config, clip_sample=clip, set_alpha_to_one=True)
    with monkeypatch.context() as patch:
        expected = draw(family, theirs, start(family), patch, guidance)
    ours = optcov.attach(family.pipeline(), family.bundle, "DDIM")
    if family.bundle.schedule.discrete:
        times = {str(STEPS): [int(t) + 1 for t in theirs.scheduler.timesteps.flip(0)]}
        ours.scheduler = type(ours.scheduler).from_config(ours.scheduler.config, trajectories=times)
    close(draw(family, ours, start(family), monkeypatch, guidance), expected, 2e-4)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_a_pipeline_draws_by_bridge_2m_what_the_bundle_draws(
    family: Family, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guidance != 1 and family.name not in GUIDED:
        pytest.skip("it has no guidance")
    pipeline, noises = family.pipeline(), recorded_noises(monkeypatch)
    kind = BridgeScheduler if family.bundle.schedule.discrete else FlowMatchBridgeScheduler
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config)
    attached = optcov.attach(family.pipeline(), family.bundle, "Bridge 2M").scheduler
    assert isinstance(attached, kind)
    assert attached.config.get("shift") == pipeline.scheduler.config.get("shift")

    found = draw(family, pipeline, start(family), monkeypatch, guidance)
    assert len(noises) == STEPS - 1

    class SameNoise:
        def draw(self, number: int, t: float, s: float) -> Tensor:
            return of_two(family, noises[number - 1])

    monkeypatch.setattr(solver, "noise_source", lambda *_: SameNoise())
    network = family.bundle.guided(family.bundle.network.with_only_heads(), guidance)
    noise = BridgeNoise(family.bundle.schedule, times_of(pipeline.scheduler))
    expected = solver.multistep_sample(network, noise, start(family), condition=family.condition).x_0
    close(found, expected, 1e-3)


def test_an_attached_pipeline_is_saved_and_loaded_and_follows_its_generator(family: Family, tmp_path: Path) -> None:
    pipeline = optcov.attach(family.pipeline(), family.bundle, "NPR-DDIM")
    pipeline.save_pretrained(tmp_path / "pipeline")
    again = type(pipeline).from_pretrained(tmp_path / "pipeline")
    again.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt" if family.name == "dit" else "np"}
    if family.name in WITH_CAPTIONS:
        options |= {"prompt": tiny.CAPTIONS[:2], "height": 16, "width": 16}
    if family.name == "pixart":
        options |= {"use_resolution_binning": False, "clean_caption": False}
    if family.name == "dit":
        options["class_labels"] = [1, 2]

    def drawn(which: Any, seed: int) -> Tensor:
        return torch.as_tensor(which(generator=torch.Generator().manual_seed(seed), **options).images)

    first = drawn(pipeline, 0)
    torch.testing.assert_close(drawn(pipeline, 0), first, rtol=0, atol=1e-6)
    torch.testing.assert_close(drawn(again, 0), first, rtol=0, atol=1e-4)
    assert not torch.allclose(drawn(pipeline, 1), first, atol=1e-3)


@pytest.mark.parametrize(("channels", "said"), [(8, True), (4, False)])
def test_one_is_told_what_a_learned_variance_in_the_output_is(channels: int, said: bool) -> None:
    from optcov.fitting.fit import FitPlan
    from optcov.fitting.settings import FitSettings

    model = tiny.seeded(lambda: tiny.dit(channels))
    settings = FitSettings(images=8, batch_size=4, measure_images=4, times=4, calibration_samples=0)
    plan = FitPlan(model, (tiny.images(8), torch.arange(8)), settings=settings, progress=False)
    assert ("a variance that it learned, kept as the covariance range" in str(plan)) is said
    assert plan.bundle.network.learned_range is said


@pytest.mark.parametrize("family", ["sd3", "flux"], indirect=True)
def test_a_pipeline_keeps_its_callback_and_its_own_sigmas(family: Family) -> None:
    pipeline = optcov.attach(family.pipeline(), family.bundle, "NPR-DDIM")
    seen: list[int] = []

    def count(_pipeline: Any, step: int, _time: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(step)
        return kwargs

    options: dict[str, Any] = {"prompt": tiny.CAPTIONS[:1], "height": 16, "width": 16, "output_type": "latent"}
    sigmas = [1.0, 0.7, 0.2]
    found = pipeline(sigmas=sigmas, num_inference_steps=3, callback_on_step_end=count, **options).images
    assert seen == [0, 1, 2]
    assert bool(torch.as_tensor(found).isfinite().all())
    assert len(pipeline.scheduler.timesteps) == 3


@pytest.mark.parametrize("family", ["dit"], indirect=True)
def test_clipping_is_refused_for_latents(family: Family) -> None:
    with pytest.raises(ValueError, match="clip_mean = False is for images; latents have no range"):
        optcov.attach(family.pipeline(), family.bundle, "NPR-DDIM", clip_mean=False)
