"""Models of diffusers: pipelines, bare networks, names on the hub; strictly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel

from optcov.checkpoints import CheckpointError, import_diffusers, import_model
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


def outputs_agree(model, unet):
    x, t = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8), torch.tensor([3.0])
    with torch.no_grad():
        return torch.equal(model.unet(x, t).sample, unet(x, t).sample)


def test_a_pipeline_brings_its_schedule_and_what_it_predicts(pipeline, unet):
    model = import_model(pipeline)
    assert outputs_agree(model, unet)
    assert torch.equal(model.schedule.betas, Schedule.cosine(100).betas)
    assert (model.parameterisation, model.image_shape) == ("v_prediction", (3, 8, 8))
    assert model.time_argument(100) == 99  # diffusers counts from 0
    assert not model.learned_range


def test_a_bare_network_has_the_linear_schedule(tmp_path, unet):
    unet.save_pretrained(tmp_path)
    model = import_model(tmp_path)
    assert outputs_agree(model, unet)
    assert torch.equal(model.schedule.betas, Schedule.linear().betas)


def test_the_oldest_pipelines_keep_everything_in_one_folder(tmp_path, unet):
    unet.save_pretrained(tmp_path, safe_serialization=False)
    DDIMScheduler(num_train_timesteps=50).save_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "DDPMPipeline"}')
    model = import_model(tmp_path)
    assert outputs_agree(model, unet)
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
    assert outputs_agree(model, unet)
    assert model.source == "google/ddpm-cifar10-32"
    assert asked == [("google/ddpm-cifar10-32", ["*.json", "*.safetensors", "*.bin"])]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def download(name, allow_patterns):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match="cannot import a/b: there is no such file or directory, and the hub"):
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
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=f"cannot import {pipeline}: diffusers cannot load it"):
        import_model(pipeline)


def edit(path: Path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("unet/config.json", {"_class_name": "UNet2DConditionModel"}, "describes 'UNet2DConditionModel'"),
        ("unet/config.json", {"num_class_embeds": 10}, "conditional on a class"),
        ("unet/config.json", {"sample_size": None}, "its sample_size is None, .*; add --image-size"),
        ("scheduler/scheduler_config.json", {"_class_name": "FlowMatchEulerDiscreteScheduler"}, "its scheduler is"),
        ("scheduler/scheduler_config.json", {"prediction_type": "flow"}, "its network predicts 'flow'"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "odd"}, "gives no schedule"),
    ],
)
def test_what_cannot_be_imported_is_named(pipeline, file, changes, reason):
    edit(pipeline / file, **changes)
    with pytest.raises(CheckpointError, match=reason):
        import_model(pipeline)


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
