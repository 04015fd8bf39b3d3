from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from image_files import (
    cifar_batch,
    python_batch,
    random_images,
    small_data_set,
    write_cifar,
    write_folder,
    write_idx,
)
from optcov import data
from optcov.data import cifar, fetch, folders, idx
from optcov.data.arrays import read_npz


def test_all_256_levels_survive_the_way_to_unit_range_and_back() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    unit = data.from_8bit(levels)
    assert unit.dtype == torch.float32
    assert (float(unit[0]), float(unit[255])) == (-1.0, 1.0)
    assert torch.equal(data.to_8bit(unit), levels)
    assert torch.equal(data.to_8bit(unit.double()), levels)


def test_values_outside_the_range_are_clipped_and_nan_is_refused() -> None:
    assert data.to_8bit(torch.tensor([-7.0, 7.0, 0.0])).tolist() == [0, 255, 128]
    with pytest.raises(data.DataError, match="NaN"):
        data.to_8bit(torch.tensor([0.0, float("nan")]))
    with pytest.raises(data.DataError, match="uint8"):
        data.from_8bit(torch.zeros(3))


def test_flip_mirrors_about_half_of_the_images_and_leaves_the_others() -> None:
    images = random_images(200, 1, 3, 4)
    flipped = data.flip_half(images, torch.Generator().manual_seed(0))
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert bool((same | mirrored).all())
    assert 70 <= int(mirrored.sum()) <= 130  # 4 standard deviations of a fair coin


def test_split_is_a_deterministic_partition() -> None:
    images = data.ImageSet(random_images(50, 1, 2, 2), torch.arange(50))
    train, test = images.split(0.2)
    again = images.split(0.2)[1]
    assert torch.equal(test.labels, again.labels)  # type: ignore[arg-type]
    together = sorted(train.labels.tolist() + test.labels.tolist())  # type: ignore[union-attr]
    assert together == list(range(50))
    assert len(test) == 10
    assert not torch.equal(images.split(0.2, seed=1)[1].labels, test.labels)  # type: ignore[arg-type]
    with pytest.raises(data.DataError, match="leaves 0 for testing"):
        images.split(0.001)


def test_checksum_tells_pixels_and_shape_apart() -> None:
    images = random_images(4, 1, 6, 2)
    changed = images.clone()
    changed[3, 0, 5, 1] ^= 1
    sums = {data.ImageSet(i).checksum for i in (images, changed, images.view(4, 1, 2, 6))}
    assert len(sums) == 3
    assert data.ImageSet(images, torch.arange(4)).checksum == data.ImageSet(images).checksum


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_load_packed_or_plain(tmp_path: Path, packed: bool) -> None:
    parts = write_idx(tmp_path, packed)
    train, test = data.load(tmp_path), data.load(tmp_path, "test")
    assert torch.equal(train.images[:, 0], parts["train-images-idx3-ubyte"])
    assert train.labels.tolist() == list(range(12))  # type: ignore[union-attr]
    assert torch.equal(test.images[:, 0], parts["t10k-images-idx3-ubyte"])
    assert len(data.load(tmp_path, "all")) == 15


def test_a_folder_is_read_in_the_order_of_names_and_split_by_sub_directories(tmp_path: Path) -> None:
    images = random_images(11, 3, 5, 4)
    write_folder(tmp_path / "flat", images)
    (tmp_path / "flat" / ".hidden.png").write_bytes(b"not an image")
    assert torch.equal(data.load(tmp_path / "flat", "all").images, images)
    parts = [data.load(tmp_path / "flat", split) for split in ("train", "test")]
    assert [len(part) for part in parts] == [10, 1]
    write_folder(tmp_path / "split" / "train", images[:6])
    write_folder(tmp_path / "split" / "test", images[6:])
    assert torch.equal(data.load(tmp_path / "split", "test").images, images[6:])


def test_the_first_images_of_a_mixed_folder_are_of_all_classes(tmp_path: Path) -> None:
    for number in range(4):
        write_folder(tmp_path / f"class{number}", torch.full((25, 1, 5, 4), number, dtype=torch.uint8))
    assert data.load(tmp_path, "all").images[:25].unique().tolist() == [0]
    first, again = (data.load_mixed(tmp_path, "all").images for _ in range(2))
    assert first[:25].unique().tolist() == [0, 1, 2, 3]
    assert torch.equal(first, again)


@pytest.mark.parametrize("python", [True, False])
def test_the_order_of_cifar_is_kept(tmp_path: Path, python: bool) -> None:
    write_cifar(tmp_path, python)
    for split in ("train", "test"):
        assert torch.equal(data.load_mixed(tmp_path, split).images, data.load(tmp_path, split).images)


def test_idx_files_are_mixed_unless_they_are_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path, packed=False)
    images = data.load(tmp_path)
    assert not torch.equal(data.load_mixed(tmp_path).images, images.images)
    monkeypatch.setattr("optcov.data.sources.FASHION_MNIST", (images.checksum,))
    assert torch.equal(data.load_mixed(tmp_path).images, images.images)


def save_mode(mode: str) -> Callable[[Path], None]:
    return lambda path: Image.new(mode, (4, 5)).save(path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "cannot read the image"),
        (lambda path: path.write_bytes(b"no image at all"), "cannot read the image"),
        (
            lambda path: Image.new("RGB", (7, 5)).save(path),
            "is 7 x 5, but .*000.png is 4 x 5; a set of images needs one size",
        ),
        (save_mode("I;16"), "colour mode I;16; convert"),
    ],
    ids=["truncated", "garbage", "size", "16 bit"],
)
def test_a_bad_image_is_named(tmp_path: Path, spoil: Callable[[Path], None], reason: str) -> None:
    write_folder(tmp_path, random_images(5, 3, 5, 4))
    spoil(tmp_path / "003.png")
    with pytest.raises(data.DataError, match=reason) as caught:
        data.load(tmp_path)
    assert "003.png" in str(caught.value)


def test_an_image_that_declares_too_many_pixels_is_refused_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", __import__("zlib").crc32(header))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 10) + b"IDAT" + bytes(14))
    with pytest.raises(data.DataError, match=r"bomb\.png"):
        data.load(tmp_path)
    (tmp_path / "bomb.png").unlink()
    write_folder(tmp_path, random_images(1, 1, 5, 5))
    monkeypatch.setattr(folders, "MAX_PIXELS", 24)
    with pytest.raises(data.DataError, match="declares 5 x 5 pixels; at most 24"):
        data.load(tmp_path)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NHW"])
def test_npz_and_npy_take_every_layout(tmp_path: Path, layout: str) -> None:
    images = random_images(20, 1 if layout == "NHW" else 3, 6, 5)
    array = {"NCHW": images, "NHWC": images.permute(0, 2, 3, 1), "NHW": images[:, 0]}[layout].numpy()
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", train=array, test=array[:3], train_labels=np.arange(20))
    assert torch.equal(data.load(tmp_path / "a.npy", "all").images, images)
    train = data.load(tmp_path / "a.npz")
    assert torch.equal(train.images, images)
    assert train.labels.tolist() == list(range(20))  # type: ignore[union-attr]
    assert len(data.load(tmp_path / "a.npz", "test")) == 3


def test_a_npz_with_one_split_does_not_lend_its_images_to_the_other(tmp_path: Path) -> None:
    """Held-out images must not be those of the training: a missing split is an error, not a part of the other one."""
    images = random_images(20, 1, 6, 5)
    for name in ("train", "x_train"):
        np.savez(tmp_path / "a.npz", **{name: images.numpy()})
        assert torch.equal(data.load(tmp_path / "a.npz", "train").images, images)
        assert torch.equal(data.load(tmp_path / "a.npz", "all").images, images)
        with pytest.raises(data.DataError, match=f"{name}.*name them 'test'"):
            data.load(tmp_path / "a.npz", "test")
    np.savez(tmp_path / "a.npz", pretrained=images.numpy())  # no split, though the word is in the name
    parts = [data.load(tmp_path / "a.npz", split) for split in ("train", "test")]
    assert [len(part) for part in parts] == [18, 2]


def test_pickled_arrays_and_unclear_layouts_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(data.DataError, match="never unpickled"):
        data.load(tmp_path / "objects.npy")
    np.save(tmp_path / "unclear.npy", np.zeros((2, 3, 8, 3), np.uint8))
    with pytest.raises(data.DataError, match="does not tell where"):
        data.load(tmp_path / "unclear.npy")
    np.save(tmp_path / "float.npy", np.zeros((2, 3, 8, 8)))
    with pytest.raises(data.DataError, match="8-bit images"):
        data.load(tmp_path / "float.npy")
    np.savez(tmp_path / "names.npz", first=np.zeros(3), second=np.zeros(3))
    with pytest.raises(data.DataError, match="no images under a known name"):
        data.load(tmp_path / "names.npz")


@pytest.mark.parametrize("python", [True, False], ids=["python", "binary"])
def test_cifar_loads_from_both_published_forms(tmp_path: Path, python: bool) -> None:
    batches = write_cifar(tmp_path, python)
    train, test = data.load(tmp_path), data.load(tmp_path, "test")
    assert torch.equal(train.images, torch.cat([batches[name][0] for name in cifar.BATCHES["train"]]))
    assert test.labels.tolist() == batches["test_batch"][1]  # type: ignore[union-attr]


def test_the_handwritten_batch_is_what_pickle_itself_would_read(tmp_path: Path) -> None:
    """The test's batch is a true pickle, so that reading it without unpickling means something."""
    images, labels = cifar_batch(3, 5)
    batch = pickle.loads(python_batch(images, labels), encoding="bytes")
    assert np.array_equal(batch[b"data"], images.flatten(1).numpy())
    assert batch[b"labels"] == labels


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_runs_code_runs_nothing(tmp_path: Path, protocol: int) -> None:
    write_cifar(tmp_path, python=True)
    content = pickle.dumps({"data": Trap(tmp_path / "ran"), "labels": [1]}, protocol)
    (tmp_path / cifar.FOLDERS[""] / "test_batch").write_bytes(content)
    with pytest.raises(data.DataError, match="use the binary version"):
        data.load(tmp_path, "test")
    assert not (tmp_path / "ran").exists()


def test_hub_data_sets_load_from_local_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = random_images(6, 3, 5, 4)
    rows = {"image": [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images], "label": [0, 1, 2, 0, 1, 2]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set" / "train.parquet")
    loaded = data.load(f"hf:{tmp_path / 'set'}")
    assert torch.equal(loaded.images, images)
    assert loaded.labels.tolist() == [0, 1, 2, 0, 1, 2]  # type: ignore[union-attr]
    damaged = {"image": [{"bytes": b"no image", "path": None}] * 2, "label": [0, 1]}
    (tmp_path / "damaged").mkdir()
    datasets.Dataset.from_dict(damaged, features=features).to_parquet(tmp_path / "damaged" / "train.parquet")
    with pytest.raises(data.DataError, match=r"cannot read the image of hf:.*row 0"):
        data.load(f"hf:{tmp_path / 'damaged'}")
    with pytest.raises(data.DataError, match="cannot load hf:"):
        data.load(f"hf:{tmp_path / 'nothing'}")


def test_hub_names_without_the_package_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(data.DataError, match=r"pip install 'optcov\[datasets\]'"):
        data.load("hf:some/thing")


def test_a_source_that_is_none_says_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="give a directory"):
        data.load(tmp_path / "missing")
    with pytest.raises(data.DataError, match="holds no images"):
        data.load(tmp_path)
    with pytest.raises(data.DataError, match="unknown split"):
        data.load(tmp_path, "validation")


def test_grid_places_images_row_by_row() -> None:
    images = random_images(5, 1, 2, 3)
    canvas = data.grid(images, columns=3, border=1)
    assert canvas.shape == (1, 7, 13)
    assert torch.equal(canvas[:, 1:3, 5:8], images[1])
    assert torch.equal(canvas[:, 4:6, 1:4], images[3])
    assert int(canvas[0, 0].min()) == 255


def test_data_command_fetches_verifies_and_keeps_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optcov.cli import app

    source = small_data_set(tmp_path, monkeypatch)
    target = tmp_path / "here"
    result = CliRunner().invoke(app, ["data", "fashion-mnist", str(target)])
    assert result.exit_code == 0, result.output
    assert torch.equal(data.load(target).images, data.load(source).images)
    kept = target / "train-images-idx3-ubyte.gz"
    kept_time = kept.stat().st_mtime_ns
    damaged = target / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    list(fetch.fetch("fashion-mnist", target, source))
    assert kept.stat().st_mtime_ns == kept_time
    assert damaged.read_bytes() == (source / damaged.name).read_bytes()


def test_files_come_from_a_mirror_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_data_set(tmp_path, monkeypatch)
    handler = partial(QuietHandler, directory=str(source))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}"
        seen: list[tuple[str, int, int | None]] = []
        paths = list(fetch.fetch("fashion-mnist", tmp_path / "here", mirror, lambda *state: seen.append(state)))
        with pytest.raises(data.DataError, match=r"cannot fetch .*not found"):
            list(fetch.fetch("fashion-mnist", tmp_path / "there", f"{mirror}/nowhere"))
        server.shutdown()
    assert [path.read_bytes() for path in paths] == [(source / path.name).read_bytes() for path in paths]
    assert all(done == size for _, done, size in seen)


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, *arguments: object) -> None:
        return


def test_what_does_not_match_its_checksum_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_data_set(tmp_path, monkeypatch)
    name = fetch.DATA_SETS["fashion-mnist"].files[0].name
    content = bytearray(gzip.decompress((source / name).read_bytes()))
    content[-1] ^= 1
    (source / name).write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(data.DataError, match=f"{name} is not the published"):
        list(fetch.fetch("fashion-mnist", tmp_path / "here"))
    assert not (tmp_path / "here").exists()
    with pytest.raises(data.DataError, match=r"cannot fetch .*--from"):
        list(fetch.fetch("fashion-mnist", tmp_path / "here", tmp_path / "nowhere"))
    with pytest.raises(data.DataError, match="unknown data set"):
        list(fetch.fetch("imagenet", tmp_path / "here"))


def test_a_server_that_sends_too_much_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small_data_set(tmp_path, monkeypatch)
    name = fetch.DATA_SETS["fashion-mnist"].files[0].name
    with (source / name).open("ab") as stream:
        stream.write(bytes(100))
    with pytest.raises(data.DataError, match="longer than the published"):
        list(fetch.fetch("fashion-mnist", tmp_path / "here"))


def test_cifar_archive_is_unpacked_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    write_cifar(tmp_path / "source", python=False)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "source" / cifar.FOLDERS[".bin"], arcname=cifar.FOLDERS[".bin"])
    checksum = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    file = fetch.RemoteFile(archive.name, archive.stat().st_size, checksum)
    monkeypatch.setitem(fetch.DATA_SETS, "cifar10", fetch.DataSet("cifar10", str(tmp_path), "none", (file,)))
    with pytest.raises(data.DataError, match="is not a batch of 30730000 bytes"):
        list(fetch.fetch("cifar10", tmp_path / "here"))
    monkeypatch.setattr(fetch, "BATCH_BYTES", 4 * cifar.RECORD)
    assert len(list(fetch.fetch("cifar10", tmp_path / "here"))) == 6
    damaged = tmp_path / "here" / cifar.FOLDERS[".bin"] / "data_batch_2.bin"
    damaged.write_bytes(damaged.read_bytes()[: -cifar.RECORD])  # a batch that would still load, with an image less
    assert len(list(fetch.fetch("cifar10", tmp_path / "here"))) == 6
    assert torch.equal(data.load(tmp_path / "here").images, data.load(tmp_path / "source").images)


def test_published_checksums_are_well_formed() -> None:
    for data_set in fetch.DATA_SETS.values():
        for file in data_set.files:
            assert len(bytes.fromhex(file.checksum)) in (16, 32)
    assert json.dumps(sorted(fetch.DATA_SETS)) == '["cifar10", "fashion-mnist"]'


def test_idx_magic_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x-ubyte"
    path.write_bytes(b"\0\0\x0d\x01" + bytes(8))
    with pytest.raises(data.DataError, match="not an idx file of unsigned bytes"):
        idx.read_idx(path)


def test_npz_without_arrays_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\x05\x06" + bytes(18))
    with pytest.raises(data.DataError, match="holds no arrays"):
        read_npz(tmp_path / "a.npz")
