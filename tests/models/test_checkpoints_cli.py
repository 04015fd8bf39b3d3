"""`optcov import`: a bundle that predicts as the file did, or one sentence and nothing written."""

from __future__ import annotations

import os

import pytest
import torch
from diffusers import UNet2DModel
from typer.testing import CliRunner

import optcov.bundle
from checkpoint_files import GOLDEN_TIMES, as_ddim, golden_entries, golden_input, golden_networks, golden_state
from close_outputs import assert_close_outputs
from optcov import Schedule
from optcov.checkpoints import CheckpointError
from optcov.cli import app, main
from small_bundles import small_bundle, small_unet

CELEBA, CELEBA_HEAD, IMAGENET = "celeba64_ddpm_w32_plain", "celeba64_ddpm_w32_simple", "imagenet64_iddpm_w32_plain_out6"


def run(*arguments):
    return CliRunner().invoke(app, ["import", *map(str, arguments)], catch_exceptions=False)


def test_a_bundle_predicts_what_the_authors_network_predicts(tmp_path):
    torch.save(as_ddim(golden_state(CELEBA_HEAD)), tmp_path / "ckpt.pth")
    torch.save((torch.arange(1001.0) / 1000).numpy(), tmp_path / "gamma.pth")
    result = run(tmp_path / "ckpt.pth", "--head", "sn", "--gamma", tmp_path / "gamma.pth", "--out", tmp_path / "bundle")
    assert result.exit_code == 0
    assert f"wrote {tmp_path / 'bundle'}" in result.stdout
    bundle = optcov.bundle.load(tmp_path / "bundle")
    golden = golden_networks()[CELEBA_HEAD]
    with torch.no_grad():
        prediction = bundle.network(golden_input(64), GOLDEN_TIMES + 1)  # the network's own argument is t - 1
    for value, name in ((prediction.noise, "eps"), (prediction.head("sn"), "head")):
        assert (golden_entries(value) - torch.tensor(golden[name]["entries"])).abs().max() <= 5e-5
    assert bundle.noise_cap("SN-DDPM") == 2.0
    assert bundle.noise_cap("SN-DDIM") == 1.0
    assert float(bundle.per_time("mean_square_noise")(250)) == pytest.approx(0.25)
    step = bundle.reverse_process("SN-DDIM").step(golden_input(64)[:1], 1000, 900)
    assert bool(step.mean.isfinite().all())


def test_imagenets_second_half_becomes_the_range_head(tmp_path):
    torch.save(golden_state(IMAGENET), tmp_path / "model.pt")
    assert run(tmp_path / "model.pt", "--out", tmp_path / "bundle").exit_code == 0
    bundle = optcov.bundle.load(tmp_path / "bundle")
    with torch.no_grad():
        raw = bundle.unet(golden_input(64), GOLDEN_TIMES).sample
        prediction = bundle.network(golden_input(64), 4 * GOLDEN_TIMES + 1)
    assert_close_outputs(prediction.noise, raw[:, :3])
    assert_close_outputs(prediction.head("range"), raw[:, 3:])
    assert bundle.schedule.steps == 4000


@pytest.mark.parametrize("damage", ["truncated", "wrong shape", "code"])
def test_a_bad_file_leaves_nothing_behind(tmp_path, damage):
    path = tmp_path / "model.pth"
    state = golden_state(CELEBA)
    if damage == "wrong shape":
        state["conv_in.bias"] = torch.zeros(5)
    torch.save({"harm": print} if damage == "code" else state, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=str(path)):
        run(path, "--out", tmp_path / "bundle")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pth"]


def test_names_are_shown_as_they_are_and_never_break_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    ).save_pretrained("[v1]")
    result = run("[v1]", "--out", "out [/v2]")
    assert result.exit_code == 0
    assert " [v1] " in result.stdout
    assert "next: optcov sample 'out [/v2]' --steps 10" in result.stdout
    assert optcov.bundle.load("out [/v2]").image_shape == (3, 8, 8)
    with pytest.raises(ValueError, match=r"--out out.udcff has characters that weights cannot be read under"):
        run("[v1]", "--out", os.fsdecode(b"out\xff"))


@pytest.mark.parametrize("out", ["model.pth", "full", "model.pth/inside"])
def test_nothing_is_written_over_or_beside_what_is_there(tmp_path, out):
    torch.save(golden_state(CELEBA), tmp_path / "model.pth")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    before = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=str(tmp_path / out)):
        run(tmp_path / "model.pth", "--out", tmp_path / out)
    assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*")) == before


def test_an_import_does_not_replace_another_bundle_unless_told(tmp_path):
    out = tmp_path / "bundle"
    small_bundle(Schedule.linear(24)).save(out)
    small_unet(3).save_pretrained(tmp_path / "unet")
    before = optcov.bundle.load(out).digest()
    with pytest.raises(ValueError, match=r"holds another bundle already.*--overwrite"):
        run(tmp_path / "unet", "--out", out)
    assert optcov.bundle.load(out).digest() == before
    assert run(tmp_path / "unet", "--out", out, "--overwrite").exit_code == 0
    assert optcov.bundle.load(out).digest() != before


def test_an_import_that_is_there_is_not_repeated(tmp_path):
    small_unet().save_pretrained(tmp_path / "unet")
    run(tmp_path / "unet", "--out", tmp_path / "bundle")
    before = (tmp_path / "bundle" / "config.json").stat().st_ino
    again = run(tmp_path / "unet", "--out", tmp_path / "bundle")
    assert "is this very bundle already" in again.stderr
    assert "wrote" not in again.stdout
    assert (tmp_path / "bundle" / "config.json").stat().st_ino == before


def test_a_damaged_bundle_is_not_replaced_by_an_import_unless_told(tmp_path):
    small_unet().save_pretrained(tmp_path / "unet")
    run(tmp_path / "unet", "--out", tmp_path / "bundle")
    (tmp_path / "bundle" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds another bundle already.*--overwrite"):
        run(tmp_path / "unet", "--out", tmp_path / "bundle")
    assert run(tmp_path / "unet", "--out", tmp_path / "bundle", "--overwrite").exit_code == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_import_leaves_the_older_bundle_and_nothing_else(tmp_path, monkeypatch, error):
    torch.save(golden_state(CELEBA), tmp_path / "model.pth")
    run(tmp_path / "model.pth", "--out", tmp_path / "bundle")

    def fail(*_):
        raise error

    monkeypatch.setattr("optcov.bundle.saving.save_unet", fail)
    line = ["import", str(tmp_path / "model.pth"), "--out", str(tmp_path / "bundle"), "--overwrite"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "model.pth"]
    assert optcov.bundle.load(tmp_path / "bundle").image_shape == (3, 64, 64)


def test_a_users_mistake_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    (tmp_path / "model.pth").touch()
    monkeypatch.delenv("OPTCOV_TRACEBACK", raising=False)
    monkeypatch.setattr("sys.argv", ["optcov", "import", str(tmp_path / "model.pth"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: cannot import {tmp_path / 'model.pth'}: the file is empty\n"
    assert not (tmp_path / "out").exists()
