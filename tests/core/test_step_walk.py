"""One step is short to follow, and docs/architecture.md describes the walk and the layers that there are."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def counter():
    if sys.version_info < (3, 11):
        pytest.skip("a frame does not know the class of its function before Python 3.11")
    return runpy.run_path(str(ROOT / "benchmarks" / "step_calls.py"))


def section(title: str) -> str:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("covariance", ["npr", "sn"])
def test_a_step_with_a_plain_function_is_short(counter, covariance):
    walk = counter["plain_step"](covariance)
    assert len(walk.calls) <= 20, walk.calls
    assert len(walk.files) <= 6
    assert walk.changes <= 9


def test_a_step_with_a_network_and_a_head_is_short(counter):
    """A network of classes has its class checked and told besides, and a deep head its hidden layers."""
    plain = counter["embedded_step"](ROOT / "tests" / "golden" / "fashion-0.1")
    assert len(plain.calls) <= 60, plain.calls
    told = counter["embedded_step"]("fashion")
    assert len(told.calls) <= 75, told.calls


def test_the_documented_walk_is_the_one_that_runs(counter):
    told = re.findall(r"^    (\S+\.py) +(\S+)", section("The walk of one step"), re.MULTILINE)
    ran = counter["plain_step"]("npr").calls
    assert told == ran


def test_the_five_lines_are_those_of_the_module():
    lines = re.findall(r"^    (prediction|posterior|anchor|step|x_s) +=", section("The walk of one step"), re.MULTILINE)
    assert lines == ["prediction", "posterior", "anchor", "step", "x_s"]
    module = (ROOT / "src" / "optcov" / "reverse.py").read_text(encoding="utf-8")
    assert re.findall(r"^(prediction|posterior|anchor|step) +=", module, re.MULTILINE) == lines[:4]


def test_the_documented_layers_are_those_that_are_enforced():
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("layers = [\n", 1)[1].split("]", 1)[0]
    enforced = [set(line.split(" | ")) for line in re.findall(r'"(.+)"', contract)]
    rows = re.findall(r"^\| (`.+?`) \| ", section("Layers"), re.MULTILINE)
    documented = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert documented == enforced
    package = ROOT / "src" / "optcov"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} == set().union(*enforced)


def test_the_documented_sizes_are_those_of_the_packages():
    """Within a fifth or 200 lines: they tell what is large, and need no change with every commit."""
    package = ROOT / "src" / "optcov"
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", section("Sizes"), re.MULTILINE))
    assert set(rows) == {path.parent.name for path in package.glob("*/__init__.py")}
    for name, told in rows.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (package / name).rglob("*.py"))
        documented = int(told.replace(",", ""))
        assert abs(documented - lines) <= max(200, lines / 5), f"{name} has {lines} lines; write that down"
