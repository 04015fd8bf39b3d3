"""Single values that once ended in a traceback, a hang or gigabytes: each is refused in one sentence, or harmless."""

from __future__ import annotations

import json
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from command_line import CommandLine, runner
from memory_bounds import memory_below
from optcov import Schedule, bundle, data, storage
from optcov.bundle import BundleError, NumbersPerTime
from optcov.bundle.config import BundleConfig
from optcov.checkpoints import CheckpointError, import_model
from optcov.cli import app
from optcov.data import DataError
from optcov.data.sample_directory import SampleDirectory
from optcov.fitting import time_grid
from optcov.fitting.config import TrainingConfig
from optcov.fitting.settings import FitSettings
from optcov.likelihood.discretised import discretised_log_prob
from optcov.storage import StorageError
from small_bundles import save_with_images, small_bundle, small_unet

HUGE = 10**400
UNET_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
COMMANDS_WITH_A_SEED = ("sample", "fit", "train", "bpd", "trajectory", "frechet", "table", "report")


@pytest.fixture
def optcov(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_images(tmp_path_factory.mktemp("values"), Schedule.linear(24))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "small", tmp_path / "copy"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(path, "pt") as stream:
        metadata = stream.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


# numbers in JSON


@pytest.mark.parametrize(
    "change",
    [
        {"time_argument": {"scale": HUGE, "shift": 0}},
        {"time_argument": {"scale": 1, "shift": HUGE}},
        {"time_argument": {"scale": 1e308, "shift": 0}},
        {"data_range": [-1, HUGE]},
        {"data_range": [-HUGE, 1]},
        {"data_range": [-1, 1e308]},
        {"data_range": [0, 1e-320]},
        {"noise_caps": {"SN-DDPM": HUGE}},
    ],
    ids=lambda change: f"{next(iter(change))} {str(change)[-12:]}",
)
def test_a_number_beyond_all_bounds_in_a_config_is_refused(copy: Path, change: dict[str, Any]) -> None:
    content = {**json.loads((copy / "config.json").read_text()), **change}
    with pytest.raises(BundleError, match=next(iter(next(iter(change)).split("_")))):
        BundleConfig.from_json(content)
    (copy / "config.json").write_text(json.dumps(content))
    with pytest.raises(StorageError, match=r"config\.json"):
        bundle.load(copy)


def test_a_history_with_a_number_beyond_all_bounds_is_refused(copy: Path) -> None:
    (copy / "provenance.json").write_text(json.dumps({"calibration": {"npr": {"ratio": [HUGE]}}}))
    with pytest.raises(StorageError, match=r"provenance\.json .* a number of 401 digits"):
        bundle.load(copy)


@pytest.mark.parametrize(
    "change", [{"norm_eps": "x"}, {"dropout": "x"}, {"freq_shift": "x"}, {"norm_eps": None}, {"layers_per_block": 1.5}]
)
def test_a_setting_of_the_network_of_the_wrong_type_is_named(copy: Path, change: dict[str, Any]) -> None:
    edit(copy / "unet" / "config.json", lambda content: {**content, **change})
    with pytest.raises(BundleError, match=f"config.json: {next(iter(change))} = "):
        bundle.load(copy)


def test_a_network_that_cannot_compute_images_of_its_size_is_refused(copy: Path) -> None:
    edit(copy / "config.json", lambda content: {**content, "image_shape": [1, 7, 8]})
    with pytest.raises(BundleError, match=r"cannot compute images of shape \(1, 7, 8\)"):
        bundle.load(copy)


@pytest.mark.parametrize("distinct", [False, True], ids=["one schedule", "a schedule each"])
def test_a_small_file_of_trajectories_takes_little_memory(copy: Path, distinct: bool) -> None:
    entries = [
        {"schedule": {"kind": "cosine", "steps": 100_000 - distinct * i}, "method": "DDIM", "times": [1 + i]}
        for i in range(1000)
    ]
    (copy / "trajectories.json").write_text(json.dumps(entries))
    began = time.monotonic()
    with memory_below(400):
        if distinct:
            with pytest.raises(BundleError, match=r"trajectories\.json: .*16 schedules"):
                bundle.load(copy)
        else:
            assert len(bundle.load(copy).trajectories) == 1000
    assert time.monotonic() - began < 10


# tensors


@pytest.mark.parametrize("name", ["times", "mean_square_noise"])
def test_numbers_per_time_without_a_dimension_are_refused(copy: Path, name: str) -> None:
    rewrite(copy / "numbers.safetensors", lambda tensors: tensors.update({name: torch.tensor(1.0).double()}))
    with pytest.raises(BundleError, match=r"numbers\.safetensors: .* must be a float64 tensor \(T,\)"):
        bundle.load(copy)
    with pytest.raises(BundleError, match="must be a float64 tensor"):
        NumbersPerTime(torch.tensor(1.0).double(), torch.tensor(1.0).double())


STRANGE_TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", STRANGE_TYPES, ids=str)
@pytest.mark.parametrize("file", [UNET_WEIGHTS, "heads/npr.safetensors"])
def test_weights_that_are_no_plain_floats_are_refused(copy: Path, file: str, dtype: torch.dtype) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = sorted(tensors)[0]
        tensors[name] = tensors[name].float().to(dtype)

    rewrite(copy / file, change)
    with pytest.raises(BundleError, match=f"holds {dtype}, .*convert it to torch.float32") as caught:
        bundle.load(copy)
    assert str(copy / file) in str(caught.value)


@pytest.mark.parametrize("dtype", STRANGE_TYPES, ids=str)
def test_weights_of_diffusers_that_are_no_plain_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    small_unet().save_pretrained(tmp_path / "unet")
    path = next((tmp_path / "unet").glob("*.safetensors"))
    rewrite(path, lambda tensors: tensors.update({"conv_in.bias": tensors["conv_in.bias"].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"conv_in.bias holds {dtype}, .*convert it to torch.float32"):
        import_model(tmp_path / "unet")


def test_the_normal_distribution_of_a_bin_needs_a_positive_variance() -> None:
    x = torch.zeros(3)
    for variance in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"variance {variance}.* positive"):
            discretised_log_prob(x, x, torch.tensor([0.1, variance, 0.1]))


# options


@pytest.mark.parametrize("eta", ["1e-200", "1e-30"])
def test_an_eta_that_is_almost_zero_is_refused_in_one_sentence(
    saved: Path, tmp_path: Path, optcov: CommandLine, eta: str
) -> None:
    few = ("--images", 2, "--train-images", 2, "--times", 3, "--steps", 2)
    said = optcov("bpd", saved / "small", saved / "images.npy", "--out", tmp_path / "out", *few, "--eta", eta)
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith(f"error: eta = {float(eta)} is so small that")


@pytest.mark.parametrize("command", COMMANDS_WITH_A_SEED)
@pytest.mark.parametrize("seed", ["99999999999999999999999", "-1"])
def test_a_seed_that_no_generator_takes_is_refused_with_the_range(
    saved: Path, tmp_path: Path, optcov: CommandLine, command: str, seed: str
) -> None:
    out = () if command == "frechet" else ("--out", tmp_path / "out")
    said = optcov(command, saved / "small", saved / "images.npy", f"--seed={seed}", *out)
    assert said.code == 2
    assert f"--seed {seed} is out of range; use a whole number from 0 to {2**63 - 1}" in said.err
    assert len(said.err.splitlines()) == 1


def test_more_images_than_there_is_noise_for_are_refused_at_once(
    saved: Path, tmp_path: Path, optcov: CommandLine
) -> None:
    said = optcov("sample", saved / "small", "--n", 99999999999, "--steps", 2, "--out", tmp_path / "out")
    assert said.code == 2
    assert "--n 99999999999 is more than the 4294967296 images" in said.err
    assert not (tmp_path / "out").exists()


def test_a_run_of_very_many_images_begins_without_a_list_of_them(tmp_path: Path) -> None:
    directory = SampleDirectory(tmp_path, {})
    directory.save(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [0, 2])
    with memory_below(20):
        missing = directory.missing(2**32)
        assert len(missing) == 2**32 - 2
        assert [missing[i] for i in (0, 1, -1)] == [1, 3, 2**32 - 1]
        assert list(missing[1:4]) == [3, 4, 5]
        share = missing[len(missing) // 2 : len(missing)]
        assert list(share[:2]) == [2**31 + 1, 2**31 + 2]


def test_more_samples_than_fit_into_memory_are_refused_before_the_first(saved: Path, optcov: CommandLine) -> None:
    pair = (f"{saved / 'small'}:DDIM", f"{saved / 'small'}:DDPM")
    said = optcov("frechet", *pair, "--samples", 99999999999, "--steps", 2, "--features", "fashion")
    assert said.code == 2
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["images", "steps", "calibration_samples", "score_samples"])
def test_a_fit_that_would_never_end_is_refused(name):
    FitSettings(**{name: 10**9}, kind="residual")
    with pytest.raises(ValueError, match=rf"{name} = 1000000001 would never end; use 1000000000 or fewer"):
        FitSettings(**{name: 10**9 + 1}, kind="residual")


def test_a_training_that_would_never_end_is_refused():
    TrainingConfig(10**9)
    with pytest.raises(ValueError, match=r"steps = 10{40} would never end; use 1000000000 or fewer"):
        TrainingConfig(10**40)


def test_more_times_than_make_sense_are_refused(saved: Path, tmp_path: Path, optcov: CommandLine) -> None:
    with memory_below(50), pytest.raises(ValueError, match="999999999 times are too many"):
        time_grid(Schedule.linear(), 999_999_999)
    out = tmp_path / "out"
    said = optcov("fit", saved / "small", saved / "images.npy", "--out", out, "--times", 999999999)
    assert said.code == 2
    assert not out.exists()


# what a run finds of an earlier one


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:40], lambda content: content[:-12], lambda content: content[:-1]],
    ids=["empty", "cut early", "without its end", "one byte short"],
)
def test_a_damaged_image_is_drawn_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    directory = SampleDirectory(tmp_path, {})
    directory.save(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), [0, 1, 2])
    assert list(directory.missing(3)) == []
    path = tmp_path / "images" / "000001.png"
    path.write_bytes(damage(path.read_bytes()))
    assert list(directory.missing(3)) == [1]


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18)], ids=["no bytes", "an archive of nothing"])
def test_an_empty_shard_is_drawn_again_and_takes_no_memory(tmp_path: Path, content: bytes) -> None:
    directory = SampleDirectory(tmp_path, {}, "npz")
    directory.save(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [0, 1])
    (tmp_path / "shards" / "images-000000-99999999999999.npz").write_bytes(content)
    with memory_below(50):
        assert list(directory.missing(4)) == [2, 3]
        assert directory.first(2).shape == (2, 1, 4, 4)


def test_a_shard_with_a_changed_byte_is_drawn_again(tmp_path):
    directory = SampleDirectory(tmp_path, {}, "npz")
    random = torch.Generator().manual_seed(0)
    directory.save(torch.randint(256, (4, 3, 128, 128), generator=random, dtype=torch.uint8), range(4))
    (shard,) = (tmp_path / "shards").iterdir()
    assert len(directory.missing(4)) == 0
    content = bytearray(shard.read_bytes())
    content[len(content) * 3 // 4] ^= 255  # far behind the header of the array
    shard.write_bytes(content)
    assert list(directory.missing(4)) == [0, 1, 2, 3]


def test_a_shard_that_holds_fewer_images_than_its_name_says_is_drawn_again(tmp_path: Path) -> None:
    directory = SampleDirectory(tmp_path, {}, "npz")
    directory.save(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [0, 1])
    (tmp_path / "shards" / "images-000000-000001.npz").rename(tmp_path / "shards" / "images-000000-000005.npz")
    assert list(directory.missing(3)) == [0, 1, 2]


def test_sampling_replaces_a_damaged_image(saved: Path, tmp_path: Path) -> None:
    arguments = ["sample", str(saved / "small"), "--steps", "2", "--n", "3", "--out", str(tmp_path / "out"), "--json"]
    first = runner.invoke(app, arguments, catch_exceptions=False)
    path = tmp_path / "out" / "images" / "000001.png"
    whole = path.read_bytes()
    path.write_bytes(b"")
    again = runner.invoke(app, arguments, catch_exceptions=False)
    assert (json.loads(first.stdout)["drawn"], json.loads(again.stdout)["drawn"]) == (3, 1)
    assert path.read_bytes()[:8] == whole[:8]


# names that steer a terminal


@pytest.mark.parametrize("command", ["sample", "bpd", "fit", "info", "import"])
def test_control_characters_of_a_name_never_reach_the_terminal(
    saved: Path, tmp_path: Path, optcov: CommandLine, command: str
) -> None:
    evil = tmp_path / "evil\x1b[2J\x07\rname"
    shutil.copytree(saved / "small", evil)
    few = ("--images", 2, "--train-images", 2, "--times", 3, "--steps", 2)
    out = evil.with_name("out\x1b[31mred")
    images = saved / "images.npy"
    small_unet().save_pretrained(tmp_path / "unet\x1b[2J")
    arguments: dict[str, tuple[object, ...]] = {
        "sample": (evil, "--steps", 2, "--n", 1, "--out", out),
        "bpd": (evil, images, "--out", out, *few),
        "fit": (evil, images, "--out", out, "--heads", "none", "--measure-images", 2, "--calibration-samples", 0),
        "info": (evil,),
        "import": (tmp_path / "unet\x1b[2J", "--out", tmp_path / "plain"),
    }
    said = optcov(command, *arguments[command])
    assert said.code == 0, said.err
    for text in (said.out, said.err):
        assert all(c.isprintable() or c == "\n" for c in text), repr(text)
    assert "\\x1b[" in said.out + said.err


# images


def png(rows: int, height: int, interlaced: bool = False) -> bytes:
    """A grey image of width 4 whose data holds only some of its rows, in chunks that are all whole."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 4, height, 8, 0, 0, 0, interlaced)
    pixels = zlib.compress((b"\0" + b"\x80" * 4) * rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_an_image_with_missing_rows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(6, 6))
    assert data.load(tmp_path, "all").shape == (1, 6, 4)
    (tmp_path / "b.png").write_bytes(png(4, 6))
    with pytest.raises(DataError, match=r"b\.png: .*20 of 30 bytes"):
        data.load(tmp_path, "all")


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("size", [(1, 1), (3, 2), (8, 8), (13, 9)])
def test_whole_interlaced_images_of_any_size_are_read(tmp_path: Path, mode: str, size: tuple[int, int]) -> None:
    """By their size alone: Pillow writes none, so the passes are laid out here."""
    from optcov.data.png import raw_size

    width, height = size
    channels = len(mode)
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    expected = 0
    for x, y, dx, dy in passes:
        columns, rows = len(range(x, width, dx)), len(range(y, height, dy))
        expected += rows * (1 + columns * channels) if columns else 0
    assert raw_size(width, height, 8 * channels, interlaced=True) == expected
    assert raw_size(width, height, 8 * channels, interlaced=False) == height * (1 + width * channels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera_is_applied(tmp_path: Path, kind: str, orientation: int) -> None:
    pixels = np.zeros((16, 8), np.uint8)
    pixels[:8, :] = 255  # bright above
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / f"a.{kind.lower()}", kind, exif=exif)
    found = data.load(tmp_path, "all").images[0, 0]
    bright = {1: "above", 2: "above", 3: "below", 4: "below", 5: "left", 6: "right", 7: "right", 8: "left"}[orientation]
    half = {"above": found[:8], "below": found[8:], "left": found[:, :8], "right": found[:, 8:]}[bright]
    assert tuple(found.shape) == ((8, 16) if orientation > 4 else (16, 8))
    assert half.float().mean() > 200
    assert found.float().mean() < 150


def test_json_is_read_without_numbers_of_hundreds_of_digits(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"a": [{10**299}, -{10**299}]}}')
    assert storage.read_json(tmp_path / "a.json") == {"a": [10**299, -(10**299)]}
    (tmp_path / "a.json").write_text(f'{{"a": -{HUGE}}}')
    with pytest.raises(StorageError, match=r"a\.json is not valid JSON: it holds a number of 401 digits"):
        storage.read_json(tmp_path / "a.json")


def test_small_bundles_still_load(saved: Path) -> None:
    assert bundle.load(saved / "small").heads.keys() == small_bundle().heads.keys()
