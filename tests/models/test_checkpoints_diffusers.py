"""Models of diffusers: pipelines, bare networks, names on the hub; strictly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel

from close_outputs import assert_close_outputs
from memory_bounds import memory_below
from optcov.bundle.loading import bundle_of
from optcov.checkpoints import CheckpointError, import_diffusers, import_model
from optcov.fitting.sources import open_predictor
from optcov.networks import fingerprint
from optcov.networks.paper_unet import PaperUNet
from optcov.schedule import Schedule

SMALL = {
    "sample_size": 8,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return UNet2DModel(**SMALL).eval()


@pytest.fixture
def pipeline(tmp_path, unet):
    scheduler = DDPMScheduler(
        beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", num_train_timesteps=100
    )
    DDPMPipeline(unet, scheduler).save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def assert_the_same_network(found, expected):
    x, t = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8), torch.tensor([3.0])
    with torch.no_grad():
        assert_close_outputs(found(x, t).sample, expected(x, t).sample)
    assert fingerprint(found) == fingerprint(expected)  # the weights have no rounding


def test_a_pipeline_brings_its_schedule_and_what_it_predicts(pipeline, unet):
    model = import_model(pipeline)
    assert_the_same_network(model.unet, unet)
    assert torch.equal(model.schedule.betas, Schedule.cosine(100).betas)
    assert (model.parameterisation, model.image_shape) == ("v_prediction", (3, 8, 8))
    assert model.time_argument(100) == 99  # diffusers counts from 0
    assert not model.learned_range


def test_a_bare_network_has_the_linear_schedule(tmp_path, unet):
    unet.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    assert_the_same_network(model.unet, unet)
    assert torch.equal(model.schedule.betas, Schedule.linear().betas)


def test_the_oldest_pipelines_keep_everything_in_one_folder(tmp_path, unet):
    unet.save_pretrained(tmp_path, safe_serialization=False)
    DDIMScheduler(num_train_timesteps=50).save_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "DDPMPipeline"}')
    model = import_model(tmp_path)
    assert_the_same_network(model.unet, unet)
    assert model.schedule.steps == 50


def test_our_own_networks_bring_their_time_argument(tmp_path):
    PaperUNet(**SMALL, time_shift=0.0, time_scale=0.25).save_pretrained(tmp_path)
    assert import_model(tmp_path).time_argument(6) == 1.5


def test_twice_the_channels_are_a_learned_range(tmp_path):
    UNet2DModel(**SMALL, out_channels=6).save_pretrained(tmp_path / "6")
    assert import_model(tmp_path / "6").learned_range
    UNet2DModel(**SMALL, out_channels=5).save_pretrained(tmp_path / "5")
    with pytest.raises(CheckpointError, match="turns 3 channels into 5"):
        import_model(tmp_path / "5")


def test_a_name_on_the_hub_is_downloaded(pipeline, unet, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(pipeline)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = import_model("google/ddpm-cifar10-32")
    assert_the_same_network(model.unet, unet)
    assert model.source == "google/ddpm-cifar10-32"
    assert asked == [("google/ddpm-cifar10-32", ["*.json", "*.safetensors", "*.bin"])]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def download(name, allow_patterns):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match="cannot import a/b: there is no such file, and the hub"):
        import_model("a/b")


def change_weights(pipeline, change):
    path = pipeline / "unet" / "diffusion_pytorch_model.safetensors"
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file(weights, path, {"format": "pt"})


def test_missing_and_unexpected_keys_are_errors(pipeline):
    change_weights(pipeline, lambda weights: weights.pop("conv_in.bias"))
    with pytest.raises(CheckpointError, match=r"1 missing keys: conv_in.bias"):
        import_model(pipeline)
    change_weights(pipeline, lambda weights: weights.update({"extra": torch.zeros(1), "conv_in.bias": torch.zeros(32)}))
    with pytest.raises(CheckpointError, match=r"1 unexpected keys: extra"):
        import_model(pipeline)


def test_mis_shaped_and_damaged_weights_are_errors(pipeline):
    change_weights(pipeline, lambda weights: weights.update({"conv_in.bias": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"conv_in.bias has shape \(3,\) instead of \(32,\)"):
        import_model(pipeline)
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 10**6)
    with pytest.raises(CheckpointError, match=f"cannot import {pipeline}: .* is not a whole safetensors file"):
        import_model(pipeline)


def edit(path: Path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("unet/config.json", {"_class_name": "UNet2DConditionModel"}, "describes 'UNet2DConditionModel'"),
        ("unet/config.json", {"num_class_embeds": 10}, "missing keys: class_embedding.weight"),
        ("unet/config.json", {"class_embed_type": "timestep"}, "it embeds classes by 'timestep'"),
        ("unet/config.json", {"sample_size": None}, "its sample_size is None, .*; add --image-size"),
        ("scheduler/scheduler_config.json", {"_class_name": "MyScheduler"}, "its scheduler is 'MyScheduler', which"),
        ("scheduler/scheduler_config.json", {"prediction_type": "flow"}, "its network predicts 'flow'"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "odd"}, "gives no schedule"),
    ],
)
def test_what_cannot_be_imported_is_named(pipeline, file, changes, reason):
    edit(pipeline / file, **changes)
    with pytest.raises(CheckpointError, match=reason):
        import_model(pipeline)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        (
            "unet/config.json",
            {"block_out_channels": [16384, 16384]},
            r"describes 73,\d+,\d+,\d+ weights, but the files",
        ),
        ("unet/config.json", {"layers_per_block": 10**9}, "layers_per_block = 1000000000 is larger than any"),
        ("unet/config.json", {"down_block_types": ["DownBlock2D"] * 100}, "down_block_types = .* is larger than any"),
        ("unet/config.json", {"block_out_channels": "ab"}, "block_out_channels = 'ab' is of the wrong type"),
        ("unet/config.json", {"junk": "x" * 2**24}, r"config.json has 16,\d+,\d+ bytes"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**9}, "its scheduler has 1000000000 steps"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "linear", "beta_start": "x"}, "gives no schedule"),
    ],
)
def test_hostile_configs_are_refused_before_memory_is_spent(pipeline, file, changes, reason):
    edit(pipeline / file, **changes)
    with memory_below(300), pytest.raises(CheckpointError, match=reason):
        import_model(pipeline)


def replace_by_torch_file(pipeline, content):
    weights = pipeline / "unet" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    torch.save(content, weights.with_suffix(".bin"))


def test_torch_files_of_diffusers_are_checked_like_all_others(pipeline, unet):
    replace_by_torch_file(pipeline, {"conv_in.weight": print})
    with pytest.raises(CheckpointError, match="it asks to run print, and only tensors are read"):
        import_model(pipeline)
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").touch()
    replace_by_torch_file(pipeline, {key: torch.zeros(1).expand(v.shape) for key, v in unet.state_dict().items()})
    with pytest.raises(CheckpointError, match=r"its tensors claim [\d,]+ bytes"):
        import_model(pipeline)


def test_weights_that_are_not_finite_are_refused(pipeline):
    change_weights(pipeline, lambda weights: weights["conv_in.bias"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"conv_in.bias holds NaN or infinite numbers"):
        import_model(pipeline)


def test_half_precision_and_the_oldest_names_of_attention_are_understood(tmp_path, unet):
    """google/ddpm-cifar10-32 and its like name the parts of an attention as diffusers did at first."""
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    unet.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = safetensors.torch.load_file(path)
    for new, name in old.items():
        weights = {key.replace(f".{new}.", f".{name}."): value for key, value in weights.items()}
    assert any(".proj_attn." in key for key in weights)
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    assert_the_same_network(import_model(tmp_path).unet, unet)
    safetensors.torch.save_file({key: value.half() for key, value in weights.items()}, path, {"format": "pt"})
    assert all(parameter.dtype == torch.float32 for parameter in import_model(tmp_path).unet.parameters())


def test_sample_sizes_may_be_given_as_height_and_width(pipeline):
    edit(pipeline / "unet" / "config.json", sample_size=[8, 16])
    assert import_model(pipeline).image_shape == (3, 8, 16)
    edit(pipeline / "unet" / "config.json", sample_size=[8, 16, 3])
    with pytest.raises(CheckpointError, match="not height and width; add --image-size"):
        import_model(pipeline)


def test_a_bundle_is_not_taken_for_a_network_without_a_schedule(tmp_path, pipeline):
    bundle_of(import_model(pipeline)).save(tmp_path / "bundle")
    with pytest.raises(CheckpointError, match="it is a bundle already"):
        import_model(tmp_path / "bundle")


def test_options_of_the_papers_networks_do_not_belong_to_diffusers(pipeline):
    with pytest.raises(CheckpointError, match="leave out --as"):
        import_model(pipeline, "celeba64")
    assert import_diffusers(pipeline, image_size=16).image_shape == (3, 16, 16)


def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot import weights/model.pth: there is no such file"):
        import_model("weights/model.pth")


def test_a_damaged_config_is_named(pipeline):
    (pipeline / "unet" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        import_model(pipeline)
    shutil.rmtree(pipeline / "unet")
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json"):
        import_model(pipeline)


def saved_parts(directory: Path, kind: str, *parts: str) -> Path:
    """What tells a pipeline of diffusers: its index, and a config of each part."""
    directory.mkdir()
    index = {"_class_name": kind, "_diffusers_version": "0.30.0", "id2label": {"0": "tench"}}
    index |= {part: ["diffusers", part] for part in parts}
    (directory / "model_index.json").write_text(json.dumps(index))
    for part in parts:
        (directory / part).mkdir()
        (directory / part / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("kind", "parts", "reasons"),
    [
        (
            "DiTPipeline",
            ("transformer", "vae", "scheduler"),
            ("of the class DiTPipeline", "transformer", "such as DDPMPipeline"),
        ),
        (
            "PixArtPipeline",
            ("transformer", "scheduler"),
            ("of the class PixArtPipeline", "no unet", "unconditional UNet2DModel"),
        ),
        (
            "LDMPipeline",
            ("unet", "vqvae", "scheduler"),
            ("of the class LDMPipeline", "latents", "vqvae", "data_range=None"),
        ),
        ("StableDiffusionPipeline", ("unet", "vae"), ("of the class StableDiffusionPipeline", "latents", "vae")),
    ],
)
def test_a_pipeline_of_another_kind_is_refused_by_its_name_with_what_is_supported(tmp_path, kind, parts, reasons):
    directory = saved_parts(tmp_path / "pipeline", kind, *parts)
    for take in (import_model, open_predictor):
        with pytest.raises(ValueError, match="cannot import") as refusal:
            take(directory)
        for reason in reasons:
            assert reason in str(refusal.value)
        assert "id2label" not in str(refusal.value)


def test_a_latent_pipeline_is_known_by_its_decoder_though_its_network_fits(pipeline):
    index = pipeline / "model_index.json"
    edit(index, _class_name="LDMPipeline", vqvae=["diffusers", "VQModel"])
    with pytest.raises(
        CheckpointError, match="it is of the class LDMPipeline, which draws latents that its vqvae decodes"
    ):
        import_model(pipeline)
    index.unlink()
    (pipeline / "vqvae").mkdir()
    (pipeline / "vqvae" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="draws latents that its vqvae decodes"):
        import_model(pipeline)


def test_a_part_of_a_pipeline_that_is_left_out_does_not_count(pipeline):
    edit(pipeline / "model_index.json", vae=[None, None])
    assert import_model(pipeline).image_shape == (3, 8, 8)


def test_a_path_that_does_not_exist_is_called_that(tmp_path):
    with pytest.raises(ValueError, match=f"no such file or directory: {tmp_path / 'nothing'}"):
        open_predictor(tmp_path / "nothing")
    with pytest.raises(ValueError, match=f"cannot import {tmp_path / 'nothing'}: there is no such file"):
        import_model(tmp_path / "nothing")
    (tmp_path / "model.pth").touch()
    with pytest.raises(ValueError, match=r"model.pth is a file; turn it into a bundle by optcov import"):
        open_predictor(tmp_path / "model.pth")


@pytest.mark.parametrize(
    ("kind", "options", "schedule", "predicts"),
    [
        ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}, "linear", "v_prediction"),
        ("DEISMultistepScheduler", {}, "linear", "epsilon"),
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, "flow", "flow_prediction"),
    ],
)
def test_a_pipeline_on_disk_may_have_any_scheduler_that_one_in_memory_may(pipeline, kind, options, schedule, predicts):
    import diffusers

    getattr(diffusers, kind)(**options).save_pretrained(pipeline / "scheduler")
    model = import_model(pipeline)
    assert (model.schedule.spec()["kind"], model.parameterisation) == (schedule, predicts)


def test_a_scheduler_of_edm_on_disk_is_refused_as_in_memory(pipeline):
    from diffusers import EDMEulerScheduler

    EDMEulerScheduler().save_pretrained(pipeline / "scheduler")
    with pytest.raises(CheckpointError, match="EDMEulerScheduler scales the network's input and output itself; give"):
        import_model(pipeline)
