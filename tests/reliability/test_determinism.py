"""The same seed and number of threads give the same bytes; what needs a reason is in docs/dependencies.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reliability_runs import arguments, results

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["sample", "fit", "bpd", "train"])
def test_the_same_seed_gives_the_same_bytes(commands, inputs, tmp_path, command):
    found = []
    for name in ("first", "second"):
        where = inputs.prepare(tmp_path / name)
        ended = commands.run(*arguments(command), cwd=where)
        assert ended.code == 0, ended.err
        found.append(results(where))
    assert found[0] == found[1]
    if command == "sample":
        where = inputs.prepare(tmp_path / "other")
        assert commands.run(*arguments(command), "--seed", "1", cwd=where).code == 0
        assert results(where) != found[0]


def declared() -> set[str]:
    """Names of the run-time dependencies in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block
    return {re.split(r"[<>=!~;\[ ]", name)[0] for name in re.findall(r'"([^"]+)"', block[1])}


def test_every_dependency_has_a_reason_and_every_reason_a_dependency():
    at_run_time = (ROOT / "docs" / "dependencies.md").read_text().split("\n## ")[0]
    rows = re.findall(r"^\| ([a-z0-9, -]+) \| ([^|]+) \|", at_run_time, re.MULTILINE)
    reasons = {name.strip(): what for names, what in rows if names != "package" for name in names.split(",")}
    assert declared() == reasons.keys()
    assert all(len(what.split()) >= 1 for what in reasons.values())


def test_every_dependency_is_pinned_in_the_constraints():
    pinned = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    assert declared() <= normal
