"""The commands of the model zoo do what the page says: what is imported can be sampled by the method named next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from checkpoint_files import filled, full_size_networks, golden_state
from optcov.bundle.imported import bundle_of
from optcov.checkpoints import SOURCES, import_model
from optcov.methods import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "model-zoo.md"
NETWORKS = {
    "cifar10-ls": ("cifar10_iddpm", "w32_plain"),
    "cifar10-cs": ("cifar10_iddpm", "w32_plain"),
    "cifar10-vp-sde": ("cifar10_vpsde_ncsnpp", "nf32_plain"),
    "celeba64": ("celeba64_ddpm", "w32_plain"),
    "imagenet64": ("imagenet64_iddpm", "w32_plain_out6"),
    "lsun-bedroom": ("lsun_ddpm", "w32_res64_plain"),
}
HEAD_PREFIXES = ("out2", "norm_out2", "conv_out2", "before_out", "gn_out2")


def commands(name):
    """The import of a network and the sampling after it, as lists of words."""
    page = PAGE.read_text()
    found = re.search(
        rf"^    optcov (import .* --out out/{name})\n    optcov (sample out/{name} .*)\n", page, re.MULTILINE
    )
    return [shlex.split(line) for line in found.groups()]


def options(words):
    return {word[2:].replace("-", "_"): words[i + 1] for i, word in enumerate(words) if word.startswith("--")}


def write_files(directory, name):
    network, reduced = NETWORKS[name]
    structures = {"npr": "simple", "sn": "complex" if SOURCES[name].sn_head == "residual" else "simple"}
    for head, mode in structures.items():
        state = golden_state(f"{network}_{reduced}")
        for key, shape, *_ in full_size_networks()[f"{network}_{mode}"]["keys"]:
            if key.startswith(HEAD_PREFIXES):
                state[key] = filled(key, [length // 4 if length >= 128 else length for length in shape])
        torch.save(state, directory / f"{head}.pth")
    steps = SOURCES[name].schedule().steps or 1000
    torch.save(torch.linspace(0, 1, steps + 1).numpy(), directory / "ms_eps.pth")


@pytest.mark.parametrize("name", SOURCES)
def test_what_the_page_imports_runs_the_method_it_samples_by(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, name)
    importing, sampling = commands(name)
    given = options(importing)
    given.pop("out")
    model = import_model(importing[1], given.pop("as", None), **given)
    assert model.source == name
    assert set(model.heads) == {"npr", "sn"}
    bundle = bundle_of(model)
    prefixes = ("A", "NPR", "SN")
    methods = [f"{prefix}-{'DDPM' if bundle.schedule.steps else 'DPM'}" for prefix in prefixes]
    for method in (*methods, options(sampling)["method"]):
        bundle.reverse_process(method)  # raises if a head or a number is missing
    assert options(sampling)["method"] in METHODS
