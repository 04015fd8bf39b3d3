"""Files as they come: wrappers, damage, and files that mean harm."""

from __future__ import annotations

import io
import os
import pickle
import resource
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from checkpoint_files import as_score_sde, golden_state, prefixed
from memory_bounds import memory_below
from optcov.checkpoints import import_model
from optcov.checkpoints.errors import CheckpointError, naming
from optcov.checkpoints.files import read_file
from optcov.checkpoints.models import read_state
from optcov.checkpoints.wrappers import unwrap

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def same(found, expected=STATE):
    return list(found) == list(expected) and all(torch.equal(found[key], expected[key]) for key in expected)


class Harm:
    """Unpickling it would run a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "before torch 1.6"])
def test_torch_files_of_both_kinds_are_read(tmp_path, archive):
    torch.save(STATE, tmp_path / "model.pth", _use_new_zipfile_serialization=archive)
    assert same(read_file(tmp_path / "model.pth"))


def test_safetensors_and_training_directories_are_read(tmp_path):
    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors")
    assert read_file(tmp_path / "model.safetensors").keys() == STATE.keys()
    directory = tmp_path / "450000.ckpt"
    (directory / "ema_models_states").mkdir(parents=True)
    torch.save(STATE, directory / "ema_models_states" / "model.pth")
    assert same(read_file(directory))
    with pytest.raises(CheckpointError, match=r"neither ema_models_states/model.pth"):
        read_file(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        STATE,
        OrderedDict(STATE),
        prefixed(STATE),
        [prefixed(STATE), {"lr": 0.1}, 3, 4],
        [{key: -value for key, value in STATE.items()}, {}, 3, 4, prefixed(STATE)],
        {"models_states": {"model": STATE}},
        {"models_states": [prefixed(prefixed(STATE))]},
        {"models_states": {0: STATE}, "ema_models_states": {}},
        {"models_states": {"m": {k: -v for k, v in STATE.items()}}, "ema_models_states": {"m": STATE}},
        {"model": prefixed(STATE), "step": 3},
        as_score_sde(STATE),
    ],
)
def test_wrappers_come_off_and_averages_are_preferred(content):
    assert same(unwrap(content))


def test_averaged_parameters_go_around_constants():
    state = {"sigmas": torch.zeros(4), **STATE}
    found = unwrap(as_score_sde(state), constants={"sigmas"})
    assert same({key: value for key, value in found.items() if key != "sigmas"})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "at its top there is: nothing"),
        ({"epoch": 3, "weights": STATE}, "at its top there is: epoch, weights"),
        (3, "it holds a int, not the weights of a network"),
        ([3], "a list that does not begin with a state_dict"),
        ({"models_states": {"a": STATE, "b": STATE}}, r"holds more than one network \(a, b\)"),
        ({"models_states": [STATE, STATE]}, r"holds more than one network \(2\)"),
        ({"models_states": 3}, "models_states holds a int"),
        ({"models_states": {"a": 3}}, "at its top there is: nothing"),
        ({"model": STATE, "ema": 3}, "neither tensors by name nor a list of tensors"),
        ({"model": STATE, "ema": {"shadow_params": [1, 2]}}, "neither tensors by name nor a list of tensors"),
        ({"model": STATE, "ema": {"shadow_params": [torch.ones(2)]}}, "1 averaged parameters for 2 parameters"),
        ({"model": STATE, "ema": {"shadow_params": [torch.ones(2), torch.ones(2)]}}, r"the average of a.weight"),
        ([STATE, {}, 1, 2, {"b": torch.ones(2)}], "the average of b has shape"),
    ],
)
def test_other_contents_are_refused_with_what_was_found(content, reason):
    with pytest.raises(CheckpointError, match=reason):
        unwrap(content)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle", "protocol 2"])
def test_a_pickle_that_runs_code_does_not_run_it(tmp_path, kind):
    marker, path = tmp_path / "marker", tmp_path / "model.pth"
    content = {"a.weight": torch.ones(2), "b": Harm(marker)}
    if kind in ("zip", "legacy"):
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    else:
        path.write_bytes(pickle.dumps(Harm(marker), protocol=2 if kind == "protocol 2" else 4))
    with pytest.raises(CheckpointError, match="it asks to run posix.system|not a (torch|whole)"):
        read_file(path)
    assert not marker.exists()


def test_code_is_named_in_the_refusal(tmp_path):
    torch.save(Harm(tmp_path / "marker"), tmp_path / "model.pth")
    with (
        pytest.raises(CheckpointError, match="asks to run posix.system, and only tensors are read") as caught,
        naming(tmp_path / "model.pth"),
    ):
        read_file(tmp_path / "model.pth")
    assert str(tmp_path / "model.pth") in str(caught.value)


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "legacy"])
def test_truncated_files_are_refused_wherever_they_end(tmp_path, archive):
    buffer = io.BytesIO()
    torch.save(STATE, buffer, _use_new_zipfile_serialization=archive)
    whole = buffer.getvalue()
    for length in {0, 1, 4, 30, 100, len(whole) // 3, len(whole) // 2, len(whole) - 30, len(whole) - 1}:
        (tmp_path / "model.pth").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_file(tmp_path / "model.pth")


def test_bytes_changed_at_random_never_give_anything_but_a_refusal_or_tensors(tmp_path):
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    random = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(buffer.getvalue())
        for place in random.integers(0, len(damaged), 8):
            damaged[place] = random.integers(256)
        (tmp_path / "model.pth").write_bytes(damaged)
        try:
            read_file(tmp_path / "model.pth")
        except CheckpointError:
            continue


def test_a_single_bit_turned_in_a_weight_is_noticed(tmp_path):
    torch.save(STATE, tmp_path / "model.pth")
    content = bytearray((tmp_path / "model.pth").read_bytes())
    place = content.find(STATE["a.weight"].numpy().tobytes())
    content[place + 5] ^= 1
    (tmp_path / "model.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the archive is damaged \(.*/data/0 does not have its checksum\)"):
        read_file(tmp_path / "model.pth")


def test_missing_and_empty_files_say_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_file(tmp_path / "model.pth")
    (tmp_path / "model.pth").touch()
    with pytest.raises(CheckpointError, match="the file is empty"):
        read_file(tmp_path / "model.pth")


def legacy_claim(path, elements):
    """A file of before torch 1.6 whose only storage claims so many elements."""
    tensor = torch.zeros(2)

    class Claiming(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, torch.storage.TypedStorage):
                return "storage", torch.FloatStorage, "0", "cpu", elements, None
            return None

    with path.open("wb") as file:
        for part in (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True}):
            pickle.dump(part, file, protocol=2)
        Claiming(file, protocol=2).dump({"a": tensor})
        pickle.dump(["0"], file, protocol=2)
        file.write(struct.pack("<q", elements) + bytes(64))


def repeated(path):
    torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, path)


def shared(path):
    values = torch.zeros(1000)
    torch.save({str(i): values for i in range(100)}, path)


def bomb(path):
    torch.save(STATE, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(10**8))


def huge_record(path):
    torch.save({"a": torch.zeros(1000)}, path)
    content = bytearray(path.read_bytes())
    place = content.rfind(b"PK\x01\x02")  # the last entry of the central directory
    content[place + 20 : place + 28] = struct.pack("<II", 2**31, 2**31)  # its two sizes
    path.write_bytes(content)


def huge_safetensors_header(path):
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")


def lying_safetensors(path):
    header = b'{"a":{"dtype":"F32","shape":[1000000,1000000],"data_offsets":[0,4000000000000]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (repeated, "model.pth"),
        (shared, "model.pth"),
        (bomb, "model.pth"),
        (huge_record, "model.pth"),
        (lambda path: legacy_claim(path, 2 * 10**9), "model.pth"),
        (lambda path: legacy_claim(path, 10**15), "model.pth"),
        (huge_safetensors_header, "model.safetensors"),
        (lying_safetensors, "model.safetensors"),
    ],
    ids=["repeated", "shared", "bomb", "record", "legacy 8 GB", "legacy 4 PB", "huge header", "lying header"],
)
def test_files_that_claim_more_than_they_hold_are_refused_without_the_memory(tmp_path, write, name):
    write(tmp_path / name)
    with memory_below(300), pytest.raises(CheckpointError) as caught, naming(tmp_path / name):
        read_state(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def called(name, *arguments):
    module, function = name.rsplit(".", 1)
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def number(value):
    content = pickle.encode_long(value)
    return b"\x8a" + bytes([len(content)]) + content


def array(shape):
    """A pickled numpy array of this shape, with 4 bytes."""
    numbers = called("_codecs.encode", text("aaaa"), text("latin1"))
    parts = (number(1), shape, called("numpy.dtype", text("f4")), b"\x89", numbers)
    return called("numpy.core.multiarray._reconstruct") + b"(" + b"".join(parts) + b"tb"


# a container that holds the last one ten times, fifteen times over: every entry is one byte of the file
LAUGHS = b"]q\x00" + b"".join(b"(" + b"h%c" % n * 10 + b"tq%c" % (n + 1) for n in range(15))
HEX = called("_codecs.encode", text("a" * 1000), text("latin1")) + b"".join(
    b"q\x00" + called("_codecs.encode", b"h\x00", text("hex")) for _ in range(30)
)
PICKLES = {
    "bytearray": (called("builtins.bytearray", number(10**11)), "more memory than a file of"),
    "tensor": (called("torch.FloatTensor", number(10**11)), "not a whole torch file"),
    "encodings": (HEX, "more memory than a file of"),
    "laughs": (LAUGHS, "more than 100,000 entries"),
    "itself": (b"]q\x00h\x00a", "nested more than 20 deep"),
    "text for a shape": (array(text("ab")), "shape is not made of positive numbers"),
    "text in a shape": (array(text("a" * 50) + number(10**9) + b"\x86"), "shape is not made of positive numbers"),
    "no shape": (array(b"N"), "shape is not made of positive numbers"),
    "negative shape": (array(number(-1) + number(-1) + b"\x86"), "shape is not made of positive numbers"),
    "wrong shape": (array(number(2) + b"\x85"), "does not have 4 bytes"),
}


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("attack", PICKLES)
def test_pickles_without_code_cannot_take_memory_or_time_either(tmp_path, attack, archive):
    path = tmp_path / "model.pth"
    body, reason = PICKLES[attack]
    content = b"\x80\x02" + body + b"."
    if archive:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", content)
            file.writestr("archive/version", "3\n")
    else:
        start = (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True})
        path.write_bytes(b"".join(pickle.dumps(part, 2) for part in start) + content + pickle.dumps([], 2))
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    with memory_below(1000), pytest.raises(CheckpointError, match=reason):
        read_file(path)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit


def test_tensors_other_than_plain_numbers_are_refused(tmp_path):
    values = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both kinds are announced as leaving torch
        unusual = {
            "sparse": values.to_sparse(),
            "quantised": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "meta": values.to("meta"),
        }
    for tensor in unusual.values():
        torch.save(STATE | {"b": tensor}, tmp_path / "model.pth")
        with pytest.raises(CheckpointError, match="not plain numbers"):
            read_file(tmp_path / "model.pth")


def test_files_written_on_a_gpu_are_read(tmp_path, monkeypatch):
    for archive in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
            torch.save(STATE, tmp_path / "model.pth", _use_new_zipfile_serialization=archive)
        assert same(read_file(tmp_path / "model.pth"))


def test_what_is_no_regular_file_is_refused_without_being_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, reason in {
        tmp_path / "fifo": "it is no regular file",
        tmp_path / "loop": "there is no such file",
        tmp_path / ("a" * 300): "File name too long",
        tmp_path / os.fsdecode(b"bad\xff.pth"): "there is no such file",
    }.items():
        with pytest.raises(CheckpointError, match=reason) as caught:
            import_model(path)
        assert str(caught.value).isprintable()
        str(caught.value).encode()


def test_names_that_torch_cannot_open_are_named(tmp_path):
    path = tmp_path / os.fsdecode(b"bad\xff.pth")
    torch.save(STATE, tmp_path / "good.pth")
    (tmp_path / "good.pth").rename(path)
    with pytest.raises(CheckpointError, match=r"bad\\udcff.pth: its name is not UTF-8, .*; rename it"):
        import_model(path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    torch.save(STATE, tmp_path / "model.pth")
    really_open = Path.open

    def refuse(path, *arguments, **options):
        if path.name == "model.pth":
            raise PermissionError(13, "Permission denied")
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)  # permissions do not hold the superuser
    with pytest.raises(CheckpointError, match=r"cannot import .*/model.pth: Permission denied"):
        import_model(tmp_path / "model.pth")


def test_keys_cannot_steer_the_terminal_or_fill_it(tmp_path):
    strange = {
        "a\nerror: all is well\x1b[2J": torch.zeros(1),
        "../../etc/passwd": torch.zeros(1),
        "k" * 10**6: torch.zeros(1),
    }
    torch.save(golden_state("celeba64_ddpm_w32_plain") | strange, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="3 unexpected keys") as caught:
        import_model(tmp_path / "model.pth")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_arrays_stored_by_columns_keep_their_places(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    torch.save(np.asfortranarray(values), tmp_path / "array.pth")
    assert read_file(tmp_path / "array.pth").tolist() == values.tolist()


def test_arrays_of_numpy_are_read_without_numpy(tmp_path):
    for dtype in (np.float32, np.float64):
        torch.save(np.arange(4, dtype=dtype), tmp_path / "array.pth")
        assert read_file(tmp_path / "array.pth").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), np.arange(3), np.zeros(2, dtype=[("a", "f4")])])
def test_arrays_of_anything_but_floats_are_refused(tmp_path, array):
    torch.save(array, tmp_path / "array.pth")
    with pytest.raises(CheckpointError):
        read_file(tmp_path / "array.pth")
