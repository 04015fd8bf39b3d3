"""Mutated bundles and mutated models of diffusers: each ends in a bundle that loads, or in one sentence.

Every case may take 2 GB and 10 seconds. The cases are numbered, and a number always makes the same case, so that what
the long suite finds can be looked at alone: `mutate(random.Random(number), ...)`. The short suite runs a few.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from command_line import CommandLine, Said
from optcov import Schedule, Trajectory, bundle
from optcov.checkpoints.files import limited_growth
from optcov.experiments.timing import peak_memory
from small_bundles import SHAPE, small_bundle, small_unet

MEGABYTES, SECONDS = 2000, 10.0
SHORT, BUNDLES, DIFFUSERS = 12, 500, 200
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 16384, 16385, 100_000, 100_001, 2**31, 2**63, 10**18, 10**400),
    *(0.5, -0.5, 1e-320, 1e-9, 1e9, 1e30, 1e308, float("nan"), float("inf"), "", "x", "1", "linear", "sample"),
    *("v_prediction", "\x1b[2J", "../../x", [], {}, [[]], [1, 2], [0, 0], ["x", "y"], {"a": 1}, [8] * 70, [None]),
    *("swish", "gelu", "mish", "AttnDownBlock2D", "AttnUpBlock2D", "DownBlock2D", "scaled_linear", "scale_shift"),
)
TYPES = (torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture
def optcov(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import DDPMPipeline, DDPMScheduler

    directory = tmp_path_factory.mktemp("originals")
    made = small_bundle(Schedule.linear(24))
    made = made.with_trajectories("NPR-DDPM", [Trajectory([8, 24]), Trajectory([1, 8, 24])])
    made.with_provenance(heads={"seed": 0}, calibration={"npr": {"ratio": [1.0, 0.9]}}).save(directory / "bundle")
    DDPMPipeline(small_unet(), DDPMScheduler(24)).save_pretrained(directory / "pipeline")
    return directory


WORST = {"seconds": 0.0, "megabytes": 0.0}  # of all cases so far; the long tests leave it as figures.json


# mutations


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are in a JSON document."""
    yield path
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield from places(content[key], (*path, key))


def mutate_json(chance: random.Random, path: Path) -> None:
    content = json.loads(path.read_text())
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place = chance.choice(list(places(content)))
        if not place:
            place = (next(iter(content)),) if isinstance(content, dict) and content else ()
        parent = content
        for key in place[:-1]:
            parent = parent[key]
        kind = chance.choice(("value", "value", "value", "remove", "add", "repeat"))
        if not place:
            content = copy.deepcopy(chance.choice(VALUES))
        elif kind == "value":
            parent[place[-1]] = copy.deepcopy(chance.choice(VALUES))
        elif kind == "remove":
            del parent[place[-1]]
        elif kind == "add" and isinstance(parent, dict):
            parent[chance.choice(("surprise", "betas", "steps", "class_embed_type", "time_scale"))] = chance.choice(
                VALUES
            )
        elif isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[place[-1]]) for _ in range(chance.choice((1, 100, 2000))))
        if not isinstance(content, dict | list):
            break
    path.write_text(json.dumps(content))


def mutate_tensors(chance: random.Random, path: Path) -> None:
    with safe_open(path, "pt") as stream:
        metadata = dict(stream.metadata() or {})
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    kind = chance.choice(("type", "value", "shape", "remove", "add", "head"))
    if kind == "type":
        tensors[name] = tensors[name].float().to(chance.choice(TYPES))
    elif kind == "value":
        changed = tensors[name].clone()
        changed.view(-1)[0] = chance.choice((float("nan"), float("inf"), -1.0, 6e4, 0.0))
        tensors[name] = changed
    elif kind == "shape":
        flat = tensors[name].flatten()
        tensors[name] = chance.choice((flat[0].clone(), flat[:0].clone(), flat.clone(), flat[None, None].clone()))
    elif kind == "remove":
        del tensors[name]
    elif kind == "add":
        tensors[chance.choice(("surprise", "x" * 300, "a\x1b[2J"))] = torch.zeros(2)
    elif "config" in metadata:
        config = json.loads(metadata["config"])
        config[chance.choice(sorted(config))] = copy.deepcopy(chance.choice(VALUES))
        metadata["config"] = json.dumps(config)
    save_file(tensors, path, metadata)


def mutate_bytes(chance: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    position = chance.randrange(min(len(content), 4000))
    kind = chance.choice(("cut", "flip", "insert", "empty"))
    if kind == "cut":
        del content[position:]
    elif kind == "flip":
        content[position] ^= 1 << chance.randrange(8)
    elif kind == "insert":
        content[position:position] = chance.choice((b"9" * 400, b"\xff" * 8, b"1e999", b"[" * 3000, b"\x00"))
    else:
        content.clear()
    path.write_bytes(bytes(content))


def mutate(chance: random.Random, directory: Path, files: list[str]) -> str:
    """Damage one file in one of three ways, and tell which."""
    path = directory / chance.choice(files)
    special: Callable[[random.Random, Path], None] = mutate_json if path.suffix == ".json" else mutate_tensors
    way = chance.choice((special, special, special, mutate_bytes))
    way(chance, path)
    return f"{path.name} by {way.__name__}"


# what must hold


def within_bounds(optcov: CommandLine, *arguments: object) -> Said:
    """Run a command that may take 2 GB and 10 seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the size of now
    before, began = peak_memory(), time.monotonic()
    with limited_growth(MEGABYTES * 10**6):
        said = optcov(*arguments)
    seconds, megabytes = time.monotonic() - began, peak_memory() - before
    WORST["seconds"], WORST["megabytes"] = max(WORST["seconds"], seconds), max(WORST["megabytes"], megabytes)
    assert seconds < SECONDS
    assert megabytes < MEGABYTES
    assert said.code in (0, 2), said.err
    assert "Traceback" not in said.err
    assert "not enough memory" not in said.err
    assert "\x1b" not in said.err + said.out
    if said.code == 2:
        assert len([line for line in said.err.splitlines() if line.startswith("error: ")]) == 1, said.err
    return said


def mutated_bundle(number: int, originals: Path, tmp_path: Path, optcov: CommandLine) -> bool:
    """Look at one mutated bundle and draw from it; tells whether it could be loaded."""
    chance = random.Random(number)
    directory = Path(shutil.copytree(originals / "bundle", tmp_path / f"bundle-{number}"))
    files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file() and p.name != ".lock")
    what = mutate(chance, directory, files)
    out = tmp_path / f"out-{number}"
    try:
        said = within_bounds(optcov, "info", directory)
        if said.code == 0 and bundle.load(directory).image_shape == SHAPE:
            method = chance.choice(("NPR-DDPM", "SN-DDIM", "A-DDPM", "DDIM"))
            within_bounds(optcov, "sample", directory, "--method", method, "--steps", 2, "--n", 1, "--out", out)
    except BaseException as error:
        raise AssertionError(f"bundle {number}: {what}") from error
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(out, ignore_errors=True)
    return said.code == 0


def mutated_pipeline(number: int, originals: Path, tmp_path: Path, optcov: CommandLine) -> bool:
    """Import one model of diffusers with a mutated config; what was imported must load."""
    chance = random.Random(number)
    directory = Path(shutil.copytree(originals / "pipeline", tmp_path / f"pipeline-{number}"))
    configs = ["unet/config.json"] * 3 + ["scheduler/scheduler_config.json"] * 2 + ["model_index.json"]
    what = mutate(chance, directory, configs)
    out = tmp_path / f"imported-{number}"
    try:
        said = within_bounds(optcov, "import", directory, "--out", out)
        if said.code == 0:
            assert within_bounds(optcov, "info", out).code == 0
        else:
            assert not out.exists()
    except BaseException as error:
        raise AssertionError(f"pipeline {number}: {what}") from error
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(out, ignore_errors=True)
    return said.code == 0


def test_a_few_mutated_bundles_load_or_are_refused_in_one_sentence(originals, tmp_path, optcov):
    loaded = [mutated_bundle(number, originals, tmp_path, optcov) for number in range(SHORT)]
    assert 0 < sum(loaded) < SHORT


def test_a_few_mutated_models_of_diffusers_are_imported_or_refused_in_one_sentence(originals, tmp_path, optcov):
    loaded = [mutated_pipeline(number, originals, tmp_path, optcov) for number in range(SHORT)]
    assert 0 < sum(loaded) < SHORT


@pytest.mark.long
def test_many_mutated_bundles_load_or_are_refused_in_one_sentence(originals, tmp_path, optcov):
    loaded = [mutated_bundle(number, originals, tmp_path, optcov) for number in range(SHORT, SHORT + BUNDLES)]
    figures = {**WORST, "loaded": sum(loaded), "of": len(loaded)}
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    assert 0 < sum(loaded) < BUNDLES


@pytest.mark.long
def test_many_mutated_models_of_diffusers_are_imported_or_refused_in_one_sentence(originals, tmp_path, optcov):
    loaded = [mutated_pipeline(number, originals, tmp_path, optcov) for number in range(SHORT, SHORT + DIFFUSERS)]
    figures = {**WORST, "loaded": sum(loaded), "of": len(loaded)}
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    assert 0 < sum(loaded) < DIFFUSERS
