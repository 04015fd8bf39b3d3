"""Models of one's own: a denoiser D(x, sigma), a module with its schedule, a plain function; and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optcov
import tiny_models as tiny
from command_line import CommandLine, run
from optcov import Schedule
from optcov.fitting.fit import FitPlan
from optcov.fitting.settings import FitSettings

QUICK: dict[str, Any] = {
    "images": 8, "measure_images": 2, "times": 3, "calibration_samples": 0, "progress": False, "batch_size": 4,
}  # fmt: skip
SHAPE = (1, 8, 8)


class Net(nn.Module):
    """A network of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        level = time.float().clamp(min=1e-3).log()[:, None, None, None].expand_as(x)
        return self.out(torch.tanh(self.body(torch.cat([x, level], 1))))


class Denoiser(Net):
    """D(x, sigma) as EDM and k-diffusion have it."""

    sigma_data, sigma_min, sigma_max = 0.5, 0.0, float("inf")

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        wide = sigma.reshape(-1, 1, 1, 1)
        return x / (1 + wide**2) + 0.1 * super().forward(x / (1 + wide), sigma)


def pictures(count: int = 12) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1


def seeded(kind: Any) -> Any:
    return tiny.seeded(kind).eval()


@pytest.mark.parametrize(
    ("model", "schedule", "kind"),
    [
        (lambda: seeded(Denoiser), "edm", "sample"),
        (lambda: (seeded(Net), Schedule.flow(), "flow_prediction"), "flow", "flow_prediction"),
        (lambda: (seeded(Net), Schedule.vp_sde(), "v_prediction"), "vp_sde", "v_prediction"),
        (lambda: (seeded(Net), Schedule.linear()), "linear", "epsilon"),
    ],
    ids=["denoiser", "flow", "velocity", "noise"],
)
def test_a_module_is_fitted_by_the_name_of_its_output_layer(
    model: Any, schedule: str, kind: str, tmp_path: Path
) -> None:
    given = model()
    bundle = optcov.fit(given, pictures(), layer="out", **QUICK)
    assert (bundle.schedule.spec()["kind"], bundle.network.parameterisation) == (schedule, kind)
    drawn = bundle.sample(2, method="NPR-DDIM", steps=3, progress=False)
    assert drawn.shape == (2, *SHAPE)
    assert drawn.isfinite().all()
    score = bundle.bits_per_dim(pictures(2), steps=3, methods=["NPR-DDPM"], progress=False)
    assert torch.tensor(score.of("npr", 3).mean).isfinite()
    bundle.save(tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "unet").exists()
    module = given[0] if isinstance(given, tuple) else given
    again = optcov.load(tmp_path / "bundle", network=module)
    torch.testing.assert_close(again.sample(2, method="NPR-DDIM", steps=3, progress=False), drawn, atol=1e-5, rtol=0)


def test_a_bundle_of_a_module_of_ones_own_asks_for_that_module(tmp_path: Path) -> None:
    bundle = optcov.fit((seeded(Net), Schedule.flow(), "flow_prediction"), pictures(), layer="out", **QUICK)
    bundle.save(tmp_path / "bundle")
    with pytest.raises(ValueError, match="a Net of your own, which a bundle does not hold; pass it"):
        optcov.load(tmp_path / "bundle")
    with pytest.raises(ValueError, match="with other weights"):
        optcov.load(tmp_path / "bundle", network=Net())
    with pytest.raises(ValueError, match="holds its own network"):
        optcov.load("fashion", network=Net())


def test_a_function_is_measured_without_heads(tmp_path: Path) -> None:
    def shrink(x: Tensor, sigma: Tensor) -> Tensor:
        return x / (1 + sigma.reshape(-1, 1, 1, 1) ** 2)

    model = (shrink, Schedule.edm(), "sample")
    with pytest.raises(ValueError, match="shrink is a function without layers, so that heads have nothing to read"):
        optcov.fit(model, pictures(), **QUICK)
    bundle = optcov.fit(model, pictures(), heads=(), **QUICK)
    assert bundle.sample(2, method="A-DDIM", steps=3, progress=False).shape == (2, *SHAPE)
    bundle.save(tmp_path / "bundle")
    assert optcov.load(tmp_path / "bundle", network=shrink).numbers is not None


def test_a_network_of_diffusers_comes_with_its_scheduler(tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    transformer = tiny.pipeline("sd3").transformer
    seed = torch.Generator().manual_seed(0)
    latents, texts = 2 * torch.randn(12, 4, 8, 8, generator=seed), torch.randn(12, 5, 16, generator=seed)
    condition = {"encoder_hidden_states": texts, "pooled_projections": torch.randn(12, 16, generator=seed)}
    model = (transformer, FlowMatchEulerDiscreteScheduler(shift=3.0))
    bundle = optcov.fit(model, latents, condition=condition, **QUICK)
    assert bundle.data_range is None
    assert bundle.network.parameterisation == "flow_prediction"
    bundle.save(tmp_path / "bundle")
    first = {name: value[:2] for name, value in condition.items()}
    options: dict[str, Any] = {"method": "NPR-DDIM", "steps": 3, "condition": first, "progress": False}
    torch.testing.assert_close(
        optcov.load(tmp_path / "bundle").sample(2, **options), bundle.sample(2, **options), atol=1e-4, rtol=0
    )


def test_half_precision_stays(tmp_path: Path) -> None:
    pipeline = tiny.pipeline("dit")
    pipeline.transformer.to(torch.bfloat16)
    bundle = optcov.fit(pipeline, (tiny.images(12), torch.arange(12)), **QUICK)
    bundle.save(tmp_path / "bundle")
    again = optcov.load(tmp_path / "bundle")
    assert {weight.dtype for weight in again.unet.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in again.heads["npr"].parameters()} == {torch.float32}


def test_latents_are_encoded_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optcov.bundle.latents import Codec

    pipeline = tiny.pipeline("ldm")
    first = optcov.fit(pipeline, tiny.images(12), work=tmp_path / "work", **QUICK)
    assert list((tmp_path / "work" / "latents").glob("images-*.safetensors"))

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Codec, "encode", refuse)
    again = optcov.fit(pipeline, tiny.images(12), work=tmp_path / "work", **QUICK)
    assert again.provenance["numbers"]["data"] == first.provenance["numbers"]["data"]


def test_encoding_that_was_stopped_goes_on_with_the_next_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optcov.bundle.latents import Codec

    monkeypatch.setattr("optcov.fitting.latents.PART", 2)
    pipeline, images, encode = tiny.pipeline("ldm"), tiny.images(12), Codec.encode
    seen: list[Tensor] = []

    def stop_after(parts: int) -> None:
        def encoded(codec: Codec, batch: Tensor) -> Tensor:
            if len(seen) == parts:
                raise KeyboardInterrupt
            seen.append(batch)
            return encode(codec, batch)

        monkeypatch.setattr(Codec, "encode", encoded)

    stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        optcov.fit(pipeline, images, work=tmp_path / "work", **QUICK)
    stop_after(99)
    resumed = optcov.fit(pipeline, images, work=tmp_path / "work", **QUICK)
    assert [len(batch) for batch in seen] == [2, 2, 2, 2]  # of the 8 that a fit takes, none twice
    whole = optcov.fit(pipeline, images, **QUICK)
    found, wanted = (bundle.numbers.mean_square_residual for bundle in (resumed, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)  # other batches round otherwise on some CPUs


def test_a_share_of_the_captions_is_fitted_as_the_empty_one() -> None:
    options = {name: value for name, value in (QUICK | {"images": 40}).items() if name != "progress"}
    pipeline, captions = tiny.pipeline("sd"), [tiny.CAPTIONS[number % len(tiny.CAPTIONS)] for number in range(40)]
    for share in (0.0, 0.5, 1.0):
        plan = FitPlan(pipeline, (tiny.images(40), captions), settings=FitSettings(**options, empty_share=share))
        told = plan.train.condition(torch.arange(len(plan.train)))["encoder_hidden_states"]
        empty = plan.bundle.empty_condition["encoder_hidden_states"].reshape(told[:1].shape)
        emptied = (told == empty).flatten(1).all(1)
        assert float(emptied.double().mean()) == pytest.approx(share, abs=0.35 * (share == 0.5))  # 4 standard errors


def test_a_pipeline_and_a_folder_with_captions_are_fitted_on_the_command_line(tmp_path: Path) -> None:
    tiny.pipeline("sd").save_pretrained(tmp_path / "model")
    tiny.write_folder(tmp_path / "pictures", tiny.CAPTIONS, 12)
    options = ["--images", 8, "--measure-images", 2, "--times", 3, "--calibration-samples", 0, "--batch-size", 4]
    run("fit", tmp_path / "model", tmp_path / "pictures", "--out", tmp_path / "bundle", *options)
    assert not (tmp_path / "bundle.latents").exists()
    run("sample", tmp_path / "bundle", "--n", 2, "--steps", 2, "--out", tmp_path / "samples")
    bundle = optcov.load(tmp_path / "bundle")
    assert set(bundle.empty_condition) == {"encoder_hidden_states"}
    assert bundle.sample(1, steps=2, decode=True, progress=False).shape == (1, 3, 16, 16)


def test_bad_input_on_the_command_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.pipeline("sd").save_pretrained(tmp_path / "model")
    tiny.write_folder(tmp_path / "pictures", None, 12)
    out = tmp_path / "bundle"
    said = CommandLine(capsys)("fit", tmp_path / "model", tmp_path / "pictures", "--out", out)
    assert said.code == 2
    assert "is told a caption of each image, but pictures" in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert not out.exists()
    assert not (tmp_path / "bundle.latents").exists()
    assert not (tmp_path / "bundle.work").exists()


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        ("sd", lambda: tiny.images(12), {}, "is told a caption of each image"),
        ("sd", lambda: (tiny.images(12), tiny.CAPTIONS), {}, "12 images but 4 captions"),
        ("dit", lambda: (torch.randn(12, 3, 8, 8), torch.arange(12)), {}, "takes latents of"),
        ("dit", lambda: (torch.randn(12, 4, 16, 16), torch.arange(12)), {}, r"takes latents of shape \(4, 8, 8\)"),
        ("dit", lambda: (tiny.images(12), torch.arange(12) + 1000), {}, "class 100"),
        ("ldm", lambda: tiny.images(12, 15), {}, "sides that 2 divides"),
        (
            "sd3",
            lambda: torch.randn(12, 4, 8, 8),
            {"condition": {"encoder_hidden_states": torch.randn(3, 5, 16)}},
            "one entry for each of 12",
        ),
        (
            "sd3",
            lambda: torch.randn(12, 4, 8, 8),
            {"condition": {"encoder_hidden_states": torch.randn(12, 5, 16)}},
            "needs the condition 'pooled_projections'",
        ),
        ("ddpm", lambda: tiny.images(12, 8), {"layer": "out"}, "knows its output layer"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    model: str, data: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        optcov.fit(tiny.pipeline(model), data(), work=tmp_path / "work", **options, **QUICK)
    assert not list(tmp_path.rglob("*.json"))


def test_a_layer_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="Net has no output layer 'head'; choose one of its layers: out, body"):
        optcov.fit((seeded(Net), Schedule.flow(), "flow_prediction"), pictures(), layer="head", **QUICK)


def test_what_is_not_taken_is_named() -> None:
    from diffusers import EDMEulerScheduler, VQDiffusionScheduler

    unet = tiny.pipeline("ddpm").unet
    with pytest.raises(ValueError, match="VQDiffusionScheduler has no noise schedule"):
        optcov.fit((unet, VQDiffusionScheduler(10)), pictures(), **QUICK)
    with pytest.raises(ValueError, match="EDMEulerScheduler scales the network's input and output itself"):
        optcov.fit((unet, EDMEulerScheduler()), pictures(), **QUICK)

    class WanPipeline:
        components: dict[str, Any] = {"transformer": unet}  # noqa: RUF012

    with pytest.raises(ValueError, match="WanPipeline is no pipeline that is known here; known are DDPMPipeline"):
        optcov.fit(WanPipeline(), pictures(), **QUICK)


@pytest.mark.parametrize(
    ("schedule", "kind", "expected"),
    [
        (Schedule.flow, "flow_prediction", 500.0),
        (Schedule.vp_sde, "epsilon", 499.5),
        (Schedule.edm, "sample", 0.5),
    ],
)
def test_a_unet_is_told_real_times_as_its_schedule_tells_them(schedule: Any, kind: str, expected: float) -> None:
    """Only discrete times count from 0 in diffusers."""
    bundle = optcov.fit((tiny.pipeline("ddpm").unet, schedule(), kind), tiny.images(12, 8), heads=(), **QUICK)
    assert float(bundle.network.arguments(0.5)) == pytest.approx(expected)


def test_a_unet_with_a_scheduler_of_flow_matching_is_told_times_as_diffusers_tells_them() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    bundle = optcov.fit((tiny.pipeline("ddpm").unet, scheduler), tiny.images(12, 8), heads=(), **QUICK)
    sigmas = scheduler.sigmas[:-1]
    torch.testing.assert_close(bundle.network.arguments(sigmas), scheduler.timesteps, rtol=1e-6, atol=0)


class Vectors(nn.Module):
    """A network of vectors (B, 5), whose output layer is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 8), nn.Sequential(nn.SiLU(), nn.Linear(8, 5))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.out(self.body(torch.cat([x, time[:, None].to(x.dtype)], 1)))


@pytest.mark.parametrize("kind", ["flow_prediction", "v_prediction"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_vectors_are_fitted_scored_sampled_and_kept(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    schedule = Schedule.flow() if kind == "flow_prediction" else Schedule.vp_sde()
    data = 2 * torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    module = seeded(Vectors).to(dtype)
    bundle = optcov.fit((module, schedule, kind), data, layer="out.1", **QUICK)
    assert (bundle.image_shape, bundle.data_range) == ((5,), None)
    assert {head.kind for head in bundle.heads.values()} == {"timed"}
    bundle.save(tmp_path / "bundle")
    again = optcov.load(tmp_path / "bundle", network=module)
    for method in ("NPR-DDIM", "SN-DDPM", "DDIM"):
        drawn = bundle.sample(3, method=method, steps=3, progress=False)
        assert drawn.shape == (3, 5)
        torch.testing.assert_close(again.sample(3, method=method, steps=3, progress=False), drawn, atol=1e-5, rtol=1e-5)
    score = again.bits_per_dim(data[:4], steps=3, methods=["NPR-DDPM"], progress=False)
    assert torch.tensor(score.of("npr", 3).mean).isfinite()


def test_the_head_of_vectors_is_calibrated_in_every_coordinate() -> None:
    """The network knows the mean alone; what is left has a variance of its own in each coordinate."""
    spread = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 5)
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return self.out(torch.cat([x / (1 + sigma[:, None] ** 2).sqrt(), sigma[:, None].log() / 4], 1))

    data = spread * torch.randn(2000, 5, generator=torch.Generator().manual_seed(0))
    options = {**QUICK, "images": 2000, "batch_size": 500}
    bundle = optcov.fit((Mean(), Schedule.edm(), "sample"), data, heads=("npr",), layer="out", **options)
    found = bundle.posterior(80 * torch.randn(500, 5), 80.0).variance.mean(0)
    torch.testing.assert_close(found, spread.square(), rtol=0.2, atol=0)


class Labelled(Denoiser):
    """EDM's denoisers with classes: they are told one-hot vectors, and say how long these are."""

    label_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Linear(4, 1)

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        told = torch.zeros(1, 4) if class_labels is None else class_labels.float().reshape(-1, 4)
        return super().forward(x, sigma) + self.label(told)[:, :, None, None]


@pytest.mark.parametrize("one_hot", [False, True])
def test_a_denoiser_with_classes_is_told_one_hot_labels(one_hot: bool) -> None:
    module = seeded(Labelled)
    seen: list[Tensor] = []
    module.label.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    labels = torch.arange(12) % 4
    known: Any = {"class_labels": torch.eye(4)[labels]} if one_hot else labels
    bundle = optcov.fit(module, (pictures(), known), layer="out", **QUICK)
    assert {tuple(row) for told in seen for row in told.tolist()} == {tuple(row) for row in torch.eye(4).tolist()}
    options: dict[str, Any] = {"steps": 2, "progress": False}
    by_name = bundle.sample(2, condition={"class_labels": torch.eye(4)[[1, 3]]}, **options)
    torch.testing.assert_close(bundle.sample(2, labels=[1, 3], **options), by_name)
    assert not torch.allclose(bundle.sample(2, labels=[0, 2], **options), by_name)
    scoring: dict[str, Any] = {"steps": 2, "methods": ["NPR-DDPM"], "progress": False}
    told = bundle.bits_per_dim(pictures(2), labels=[1, 3], **scoring).of("npr", 2).mean
    assert bundle.bits_per_dim((pictures(2), torch.tensor([1, 3])), **scoring).of("npr", 2).mean == pytest.approx(told)
    assert bundle.bits_per_dim((pictures(2), torch.tensor([0, 2])), **scoring).of("npr", 2).mean != pytest.approx(told)
    with pytest.raises(ValueError, match="there is no class 4 in Labelled; its classes are 0 to 3"):
        bundle.sample(1, labels=[4], **options)


def test_a_module_that_takes_labels_is_told_those_of_the_data() -> None:
    class Net2(Net):
        def forward(self, x: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
            return super().forward(x, time) + class_labels[:, None, None, None]

    model = (seeded(Net2), Schedule.flow(), "flow_prediction")
    bundle = optcov.fit(model, (pictures(), torch.arange(12) % 3), layer="out", **QUICK)
    assert bundle.sample(2, labels=[0, 2], steps=2, progress=False).shape == (2, *SHAPE)


class Wrapper(Net):
    """As k-diffusion wraps networks of noise: sigma_min and sigma_max, and no sigma_data."""

    sigma_min, sigma_max = torch.tensor(0.03), torch.tensor(14.0)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return x - sigma.reshape(-1, 1, 1, 1) * super().forward(x, sigma)


def test_a_wrapper_with_sigmas_is_a_denoiser() -> None:
    bundle = optcov.fit(seeded(Wrapper), pictures(), layer="out", **QUICK)
    settings = bundle.schedule.settings()
    assert (settings["sigma_min"], settings["sigma_max"]) == pytest.approx((0.03, 14.0))


def test_a_function_of_sigma_is_a_denoiser() -> None:
    def shrink(x: Tensor, sigma: Tensor) -> Tensor:
        return x / (1 + sigma.reshape(-1, 1, 1, 1) ** 2)

    bundle = optcov.fit(shrink, pictures(), heads=(), **QUICK)
    assert (bundle.schedule.spec()["kind"], bundle.network.parameterisation) == ("edm", "sample")


def test_a_module_without_a_schedule_is_named_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"model = Net is not a model that heads can be fitted on; give"):
        optcov.fit(seeded(Net), pictures(), layer="out", **QUICK)


class Told(Net):
    """It cannot do without its condition."""

    def forward(self, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
        return super().forward(x, time) + words.reshape(len(x), 3).sum(1)[:, None, None, None]


class Timeless(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(self.body(x))


def spoilt(kind: Any, layer: str = "out") -> Any:
    module = seeded(kind)
    module.get_submodule(layer).weight.data.fill_(float("nan"))
    return module


FLOW = (Schedule.flow(), "flow_prediction")


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        (lambda: (seeded(Told), *FLOW), pictures, {}, "Told cannot be called with data of shape .1, 8, 8. and no cond"),
        (
            lambda: (seeded(Told), *FLOW),
            pictures,
            {"condition": {"words": torch.zeros(12, 4)}},
            r"Told cannot be called with data of shape \(1, 8, 8\) and the condition words \(4,\) of a data point",
        ),
        (lambda: (seeded(Timeless), *FLOW), pictures, {}, "Timeless cannot be called with data of shape"),
        (lambda: (seeded(Net), *FLOW), lambda: torch.zeros(12, 2, 8, 8), {}, r"data of shape \(2, 8, 8\)"),
        (lambda: (spoilt(Net), *FLOW), pictures, {}, "out.weight of Net holds NaN or infinite numbers; load it again"),
        (
            lambda: (seeded(Told), *FLOW),
            pictures,
            {"condition": {"words": torch.full((12, 3), float("nan"))}},
            "the condition 'words' holds NaN or infinity; clean it first",
        ),
        (lambda: (seeded(Net), *FLOW), pictures, {"condition": [1]}, "is not a dictionary of tensors by name"),
        (lambda: tiny.pipeline("sd"), lambda: torch.zeros(12, 4, 8, 8), {"condition": [1]}, "is not a dictionary of"),
        (
            lambda: tiny.pipeline("sd"),
            lambda: torch.zeros(12, 4, 8, 8),
            {"condition": {"encoder_hidden_states": [1] * 12}},
            "condition 'encoder_hidden_states' is a list",
        ),
        (
            lambda: tiny.pipeline("sd"),
            lambda: torch.zeros(12, 4, 8, 8),
            {"condition": {"encoder_hidden_states": torch.zeros(12, 3, 5)}},
            r"condition 'encoder_hidden_states' has entries of shape \(3, 5\), but .* takes \(any, 8\)",
        ),
        (
            lambda: tiny.pipeline("sd"),
            lambda: torch.zeros(12, 4, 8, 8),
            {"condition": {"encoder_hidden_states": torch.zeros(12, 8)}},
            r"condition 'encoder_hidden_states' has entries of shape \(8,\), but .* takes \(any, 8\)",
        ),
        (
            lambda: tiny.pipeline("dit"),
            lambda: (tiny.images(12), torch.arange(12.0) + 0.5),
            {},
            "labels are whole numbers, but one is 0.5",
        ),
    ],
    ids=[
        "told nothing", "wrong length", "no time", "wrong channels", "spoilt weights", "spoilt condition", "no mapping",
        "no mapping for a pipeline", "no tensor", "wrong width", "wrong axes", "half labels",
    ],
)  # fmt: skip
def test_what_a_network_cannot_compute_is_refused_before_the_work(
    model: Any, data: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(FitPlan, "run", lambda *_: pytest.fail("the work has begun"))
    given = model()
    layer = {"layer": "out"} if isinstance(given, tuple) else {}
    with pytest.raises(ValueError, match=message):
        optcov.fit(given, data(), **layer, **options, **QUICK)


def test_a_spoilt_encoder_of_images_is_named() -> None:
    pipeline = tiny.pipeline("sd")
    next(pipeline.vae.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="the decoder of StableDiffusionPipeline turns images into NaN"):
        optcov.fit(pipeline, (tiny.images(12), tiny.CAPTIONS * 3), **QUICK)


def test_a_spoilt_unet_of_images_is_named() -> None:
    pipeline = tiny.pipeline("ddpm")
    pipeline.unet.conv_out.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="conv_out.weight of UNet2DModel holds NaN or infinite numbers"):
        optcov.fit(pipeline, tiny.images(12, 8), half=False, **QUICK)


def test_labels_out_of_range_are_refused_before_anything_is_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    tiny.pipeline("dit").save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "data.npz", images=tiny.images(12).numpy(), labels=np.arange(12) + 995)
    before = sorted(tmp_path.iterdir())
    said = CommandLine(capsys)("fit", tmp_path / "model", tmp_path / "data.npz", "--out", tmp_path / "bundle")
    assert said.code == 2
    assert "has images of class 1000, but the 1000 classes of model are 0 to 999" in " ".join(said.err.split())
    assert sorted(tmp_path.iterdir()) == before


def test_a_scheduler_is_named_once_where_it_has_no_schedule() -> None:
    from diffusers import IPNDMScheduler, ScoreSdeVeScheduler

    unet = tiny.pipeline("ddpm").unet
    with pytest.raises(ValueError, match=r"^ScoreSdeVeScheduler has no noise schedule"):
        optcov.fit((unet, ScoreSdeVeScheduler()), tiny.images(12, 8), **QUICK)
    with pytest.raises(ValueError, match=r"^IPNDMScheduler gives no noise schedule: betas\[0\]"):
        optcov.fit((unet, IPNDMScheduler()), tiny.images(12, 8), **QUICK)


@pytest.mark.parametrize("name", ["LCMScheduler", "TCDScheduler", "CMStochasticIterativeScheduler"])
def test_a_distilled_model_is_refused_by_its_scheduler(name: str) -> None:
    import diffusers

    unet = tiny.pipeline("ddpm").unet
    with pytest.raises(ValueError, match=rf"^{name} is for a distilled model.*give the model it was distilled from"):
        optcov.fit((unet, getattr(diffusers, name)()), tiny.images(12, 8), **QUICK)


def test_what_is_refused_after_its_images_were_encoded_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    tiny.pipeline("dit").save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "large.npz", images=tiny.images(12, 32).numpy(), labels=np.arange(12))
    np.savez(tmp_path / "data.npz", images=tiny.images(12).numpy(), labels=np.arange(12))
    before, optcov_ = sorted(tmp_path.iterdir()), CommandLine(capsys)
    said = optcov_("fit", tmp_path / "model", tmp_path / "large.npz", "--out", tmp_path / "bundle")
    assert (said.code, "takes latents of shape (4, 8, 8)" in " ".join(said.err.split())) == (2, True)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ValueError, match="takes latents of shape"):
        optcov.fit(tiny.pipeline("dit"), tiny.images(12, 32), work=tmp_path / "work", **QUICK)
    assert sorted(tmp_path.iterdir()) == before
    options = ["--images", 8, "--measure-images", 2, "--times", 3, "--calibration-samples", 0, "--batch-size", 4]
    command = ("fit", tmp_path / "model", tmp_path / "data.npz", "--out", tmp_path / "bundle")
    run(*command, *options)
    run(*command, *options)  # is there already
    assert optcov_(*command, *options, "--seed", 1).code == 2  # another fit in its place
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "bundle"])
