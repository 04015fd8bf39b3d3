"""benchmarks/restoration.py: what it restores, what its tables wait for, and the row that another package makes."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from restoration_tables import OPTIONAL, whole_groups

from optcov import Schedule
from optcov.inverse import Mask
from small_bundles import SHAPE, small_bundle

ROOT = Path(__file__).parents[2]
SIZE = {"bundle": "fashion", "samples": 3, "steps": 2}


@pytest.fixture
def benchmark(monkeypatch):
    """The script as a module; its tables are made of lines, without a network."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import restoration

    monkeypatch.setattr(restoration, "spread", lambda *_: 1.0)
    return restoration


def options(out: Path, **told: object) -> Namespace:
    settings = {"data": None, "images": 2, "first": 0, "tuning": 1, "group": 1, "batch_size": 8}
    return Namespace(out=out, **{**SIZE, **settings, "only": None, **told})


def line(task: str, name: str, image: int, strength: float | None) -> dict[str, object]:
    key = {**SIZE, "noise": 0.05, "task": task, "method": name, "strength": strength, "images": [image, 1]}
    return key | {"psnr": [20.0]}


def write(path: Path, benchmark, names) -> Path:
    """Lines of these rows for two groups of one image, and the one image that strengths are chosen on."""
    tasks = benchmark.tasks((1, 28, 28))
    strengths = {name: benchmark.STRENGTHS.get(name, (None,)) for name in names}
    scored = [line(task, name, n, strengths[name][0]) for task in tasks for name in names for n in range(2)]
    rows = [*scored, *(line(task, name, 2, s) for task in tasks for name in names for s in strengths[name])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tables_do_not_wait_for_the_optional_row(benchmark, tmp_path):
    def rows(names) -> set[str]:
        written = write(tmp_path / "lines", benchmark, names).read_text().splitlines()
        return {row["method"] for row in whole_groups([json.loads(row) for row in written])}

    others = [name for name in benchmark.METHODS if name != OPTIONAL]
    assert rows(others) == set(others)
    assert rows(benchmark.METHODS) == set(benchmark.METHODS)


def test_tables_leave_out_a_group_that_a_method_lacks_and_trials_of_strengths(benchmark, tmp_path):
    path = write(tmp_path / "lines", benchmark, benchmark.METHODS)
    lines = [json.loads(row) for row in path.read_text().splitlines()]
    assert {row["images"][0] for row in whole_groups(lines)} == {0, 1}
    lacking = [row for row in lines if (row["method"], row["task"], row["images"][0]) != ("PiGDM", "box", 1)]
    assert {row["images"][0] for row in whole_groups(lacking)} == {0}


def test_only_the_chosen_rows_are_restored_and_a_second_run_restores_nothing(benchmark, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        benchmark.Comparison, "_restored", lambda self, task, name, numbers, tuned: asked.append(name) or {"psnr": [1]}
    )
    for _ in range(2):
        benchmark.Comparison(options(tmp_path / "lines", only=["PiGDM", "DPS"])).run()
    assert set(asked) == {"PiGDM", "DPS"}
    assert len(asked) == 4 * (2 + 2 + len(benchmark.STRENGTHS["DPS"]))  # two groups, and the strengths


def test_without_azula_one_sentence_says_so(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "restoration_mmps", raising=False)
    monkeypatch.setitem(sys.modules, "azula.denoise", None)
    found = benchmark.chosen(options(tmp_path / "lines"))
    assert found == set(benchmark.METHODS) - {benchmark.MMPS}
    said = capsys.readouterr().err
    assert "MMPS, azula is not restored: there is no module azula.denoise" in said
    assert len(said.splitlines()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch, called by azula
@pytest.mark.parametrize("schedule", [Schedule.linear(), Schedule.vp_sde()], ids=["discrete", "real times"])
def test_mmps_does_not_depend_on_the_batch_and_counts_its_passes(benchmark, schedule):
    pytest.importorskip("azula.sample")
    bundle, mask = small_bundle(schedule), Mask.box(SHAPE, 2, 2, 3, 3)
    y = mask.apply(torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    given = {"steps": 3, "samples": 3, "seed": 5, "strength": 3.0}
    whole, parts = (benchmark.by_mmps()(bundle, y, mask, 0.1, **given, batch_size=size) for size in (6, 2))
    assert whole.samples.shape == (2, 3, *SHAPE)
    assert torch.allclose(whole.samples, parts.samples, atol=1e-3)
    for found in (whole, parts):
        assert (found.evaluations, found.gradients) == (3, 3 * (3 + 1))  # a product an iteration, and the guidance
