"""The commands of the model zoo do what the page says: what is imported can be sampled by the method named next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from optcov.bundle.loading import bundle_of
from optcov.checkpoints import SOURCES, import_model
from optcov.methods import METHODS
from zoo_files import write_files

PAGE = Path(__file__).parents[2] / "docs" / "model-zoo.md"


def commands(name):
    """The import of a network and the sampling after it, as lists of words."""
    page = PAGE.read_text()
    found = re.search(
        rf"^    optcov (import .* --out out/{name})\n    optcov (sample out/{name} .*)\n", page, re.MULTILINE
    )
    return [shlex.split(line) for line in found.groups()]


def options(words):
    return {word[2:].replace("-", "_"): words[i + 1] for i, word in enumerate(words) if word.startswith("--")}


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
