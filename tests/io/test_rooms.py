"""The tests themselves: each in its room, none of them built on another."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))
ROOMS = {"core", "models", "io", "experiments", "reliability"}


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_every_test_is_in_a_room():
    assert {name_of(path.parent) for path in FILES} == ROOMS


def test_no_two_files_have_the_same_name():
    """Pytest imports a test by its name alone."""
    assert not [name for name, count in Counter(path.name for path in FILES).items() if count > 1]


def test_nothing_is_imported_from_a_test():
    tests = re.compile(r"(\w+\.)*test_")
    found = {
        name_of(path): [module for module in imported(path) if tests.match(module)] for path in TESTS.rglob("*.py")
    }
    assert not {name: modules for name, modules in found.items() if modules}
