"""Bundles from strangers: whatever the bytes, the answer is a ValueError that names the file, in bounded memory."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from optcov import bundle
from optcov.bundle import BundleError
from optcov.bundle.config import BundleConfig
from optcov.bundle.schedules import StoredTrajectory
from optcov.storage import StorageError
from small_bundles import small_bundle

UNET_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "small"
    small_bundle().save(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 3}, '"version" is'),
        ({"format": "zip"}, '"format" is'),
        ({"surprise": 1}, "unknown"),
        ({"heads": ["../../etc/passwd"]}, "no name for a head"),
        ({"heads": ["npr\n"]}, "no name for a head"),
        ({"heads": ["npr", "npr"]}, "names one head twice"),
        ({"heads": "npr"}, "not a list"),
        ({"schedule": {"kind": "linear", "steps": 10**12}}, "more than 100000 steps"),
        ({"schedule": {"kind": "betas", "betas": [float("nan")]}}, "schedule 'betas'"),
        ({"schedule": {"kind": "betas", "betas": ["x"]}}, "schedule 'betas'"),
        ({"schedule": {"kind": "exec"}}, "unknown schedule"),
        ({"schedule": "linear"}, "not an object"),
        ({"schedule": {"kind": ["linear"]}}, "unknown schedule"),
        ({"image_shape": [1, 10**9, 10**9]}, "more than"),
        ({"image_shape": [3, 8, 8]}, "images of 3 channels need a network with 3 inputs"),
        ({"image_shape": [1, -8, 8]}, "three positive integers"),
        ({"data_range": [1, -1]}, "low < high"),
        ({"data_range": [float("-inf"), 1]}, "low < high"),
        ({"noise_caps": {"SN-DDPM": -1}}, "not a positive number"),
        ({"prediction_type": "magic"}, "must be one of"),
        ({"learned_range": 1}, "must be one of"),
        ({"time_argument": {"scale": "999", "shift": 0}}, "not a finite number"),
    ],
    ids=str,
)
def test_a_wrong_entry_of_the_config_is_named(copy: Path, change: dict[str, Any], reason: str) -> None:
    edit(copy / "config.json", lambda content: {**content, **change})
    with pytest.raises(BundleError, match=reason) as caught:
        bundle.load(copy)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_out_channels": [10**9, 10**9]}, "larger than any network"),
        ({"layers_per_block": 10**9}, "larger than any network"),
        ({"block_out_channels": [16384, 16384]}, "has the shape"),
        ({"block_out_channels": [8] * 100}, "larger than any network"),
        ({"_class_name": "os.system"}, "not 'os.system'"),
        ({"_class_name": ["UNet2DModel"]}, "a bundle holds a UNet2DModel"),
        ({"act_fn": "eval"}, "describes no network"),
        ({"down_block_types": ["NoBlock", "NoBlock"]}, "describes no network"),
        ({"surprise": True}, "does not know"),
        ({"norm_num_groups": 0}, "describes no network"),
        ({"time_embedding_type": "x"}, "describes no network"),
    ],
    ids=str,
)
def test_a_network_config_cannot_claim_memory_or_code(copy: Path, change: dict[str, Any], reason: str) -> None:
    edit(copy / "unet" / "config.json", lambda content: {**content, **change})
    tracemalloc.start()
    with pytest.raises(BundleError, match=reason) as caught:
        bundle.load(copy)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(copy / "unet") in str(caught.value)
    assert peak < 50e6


@pytest.mark.parametrize("file", [UNET_WEIGHTS, "heads/npr.safetensors", "numbers.safetensors"])
def test_nan_in_a_file_of_numbers_is_named(copy: Path, file: str) -> None:
    from safetensors import safe_open

    with safe_open(copy / file, "pt") as stream:
        metadata = stream.metadata()
    tensors = load_file(copy / file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, copy / file, metadata)
    with pytest.raises(BundleError, match="NaN") as caught:
        bundle.load(copy)
    assert str(copy / file) in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("file", [UNET_WEIGHTS, "heads/npr.safetensors", "numbers.safetensors"])
def test_a_header_that_declares_too_much_is_refused(copy: Path, file: str) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (copy / file).write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(StorageError, match="not a whole safetensors file") as caught:
        bundle.load(copy)
    assert str(copy / file) in str(caught.value)


@pytest.mark.parametrize(
    "config",
    ["null", "[", "[" * 5000, '{"kind": "conv"}', '{"kind": "exec"}', '{"kind": "conv", "in_channels": 1e12}'],
    ids=lambda text: text[:20],
)
def test_a_head_that_describes_itself_wrongly_is_named(copy: Path, config: str) -> None:
    path = copy / "heads" / "npr.safetensors"
    save_file(load_file(path), path, {"config": config, "backbone": bundle.load(copy).fingerprint})
    with pytest.raises(BundleError, match=r"npr\.safetensors"):
        bundle.load(copy)


@pytest.mark.parametrize("missing", ["unet/config.json", UNET_WEIGHTS, "heads/sn.safetensors"])
def test_a_missing_file_is_named(copy: Path, missing: str) -> None:
    (copy / missing).unlink()
    with pytest.raises(StorageError, match=missing.rsplit("/")[-1]):
        bundle.load(copy)


def test_a_huge_json_file_is_not_read(copy: Path) -> None:
    with (copy / "provenance.json").open("wb") as stream:
        stream.truncate(2**33)
    with pytest.raises(BundleError, match=r"provenance.json has 8589934592 bytes"):
        bundle.load(copy)


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_files_end_in_a_named_error_or_load(saved: Path, data: st.DataObject) -> None:
    """Truncate, flip bits or overwrite: a StorageError that names the bundle, or a bundle that still makes sense."""
    name = data.draw(
        st.sampled_from(
            [
                "config.json",
                "unet/config.json",
                UNET_WEIGHTS,
                "heads/npr.safetensors",
                "numbers.safetensors",
                "trajectories.json",
                "provenance.json",
            ]
        )
    )
    path = saved / name
    original = path.read_bytes()
    damaged = bytearray(original)
    kind = data.draw(st.sampled_from(["cut", "flip", "insert"]))
    position = data.draw(st.integers(0, min(len(original) - 1, 3000)))
    if kind == "cut":
        del damaged[position:]
    elif kind == "flip":
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged[position:position] = data.draw(st.binary(min_size=1, max_size=8))
    path.write_bytes(bytes(damaged))
    loaded, message = None, ""
    try:
        loaded = bundle.load(saved)
    except StorageError as error:
        message = str(error)
    finally:
        path.write_bytes(original)
    if loaded is None:
        assert str(saved) in message
    else:
        assert loaded.image_shape[0] == 1
        assert all(bool(weight.isfinite().all()) for weight in loaded.network.parameters())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
KEYS = [
    "schedule",
    "time_argument",
    "prediction_type",
    "learned_range",
    "data_range",
    "image_shape",
    "noise_caps",
    "heads",
]


@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_value_of_any_entry_is_understood_or_refused(saved: Path, key: str, value: Any) -> None:
    content = json.loads((saved / "config.json").read_text())
    try:
        config = BundleConfig.from_json({**content, key: value})
    except BundleError:
        return
    assert BundleConfig.from_json(config.to_json()).to_json() == config.to_json()


@given(
    kind=st.sampled_from(["linear", "cosine", "vp_sde", "ve_sde", "betas"]),
    options=st.dictionaries(st.sampled_from(["steps", "scale", "betas", "beta_min", "beta_max", "sigma_min"]), JSON),
)
def test_any_schedule_is_understood_or_refused(kind: str, options: dict[str, Any]) -> None:
    try:
        schedule = bundle.build_schedule({"kind": kind, **options})
    except BundleError:
        return
    assert bool(schedule.log_alpha_bar(schedule.final_time).isfinite())


@given(content=st.fixed_dictionaries({"schedule": st.just({"kind": "linear"}), "method": JSON, "times": JSON}))
def test_any_stored_trajectory_is_understood_or_refused(content: dict[str, Any]) -> None:
    with pytest.raises(BundleError):
        StoredTrajectory.from_json(content)


def test_numbers_beyond_the_schedule_are_refused(copy: Path) -> None:
    tensors = load_file(copy / "numbers.safetensors")
    tensors["times"] = tensors["times"] + 1
    save_file(tensors, copy / "numbers.safetensors")
    with pytest.raises(BundleError, match=r"numbers\.safetensors: time .* is outside"):
        bundle.load(copy)
    tensors["times"] = torch.zeros_like(tensors["times"])
    save_file(tensors, copy / "numbers.safetensors")
    with pytest.raises(BundleError, match="must ascend"):
        bundle.load(copy)
