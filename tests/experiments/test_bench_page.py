"""The page of benchmarks says what its lines say, and the command that makes it goes on where it was stopped."""

from __future__ import annotations

import datetime
import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

from optcov.experiments.bench import BENCHMARKS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_page", ROOT / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_numbers_of_the_lines(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.inserted(text, page.parts(page.read())) == text, "run python benchmarks/page.py --only-write"


def test_every_ratio_has_a_date_and_an_interval(page):
    lines = page.read()
    assert lines.keys() == {*BENCHMARKS, page.MEMORY}
    for line in lines.values():
        datetime.date.fromisoformat(line["date"])
        if line["name"] != page.MEMORY:
            assert 0 < line["low"] <= line["ratio"] <= line["high"] < math.inf
            assert line["rounds"] >= 9


def test_the_printed_command_goes_on_where_it_was_stopped(page):
    """A day that is still to come would measure everything again each time."""
    (printed,) = re.findall(r"page\.py --since (\S+)", page.PAGE.read_text(encoding="utf-8"))
    assert printed <= max(line["date"] for line in page.read().values())


def test_a_changed_number_is_noticed(page):
    text, made = page.PAGE.read_text(encoding="utf-8"), page.parts(page.read())
    made["ratios"] = made["ratios"].replace("0.0", "0.1", 1)
    assert page.inserted(text, made) != text


def line(name: str, day: str) -> dict[str, object]:
    return {"name": name, "date": day}


def test_what_is_missing_or_older_is_measured(page):
    names = [*BENCHMARKS, page.MEMORY]
    found = {name: line(name, "2026-11-20") for name in names}
    assert page.due(found, "") == page.due(found, "2026-11-20") == []
    assert page.due({**found, names[1]: line(names[1], "2026-11-19")}, "2026-11-20") == [names[1]]
    del found[names[2]]
    assert page.due(found, "") == [names[2]]
    assert page.due(found, "2026-11-21") == names


def test_a_stopped_run_keeps_its_lines_and_goes_on(page, tmp_path, monkeypatch, capsys):
    measured: list[str] = []

    def measure(name: str) -> dict[str, object]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(name)
        return {**old[name], "date": "2026-11-30"}

    old = page.read()
    kept, written = tmp_path / "lines.jsonl", tmp_path / "page.md"
    written.write_text(page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    page.keep(old, kept)
    monkeypatch.setattr(page, "read", lambda read=page.read: read(kept))
    monkeypatch.setattr(page, "keep", lambda found, keep=page.keep: keep(found, kept))
    monkeypatch.setattr(page, "due", lambda *asked, due=page.due: [name for name in due(*asked) if name in old])
    monkeypatch.setattr(page, "measure", measure)
    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        page.main(["--since", "2026-11-30"])
    assert [name for name, found in page.read().items() if found["date"] == "2026-11-30"] == measured
    first, measured = measured, []
    with pytest.raises(KeyboardInterrupt):
        page.main(["--since", "2026-11-30"])
    assert len(measured) == 2
    assert not set(first) & set(measured)
    page.main(["--only-write"])
    assert written.read_text(encoding="utf-8").count("2026-11-30") == 4
    assert "wrote page.md" in capsys.readouterr().out
