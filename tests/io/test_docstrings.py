"""The examples in docstrings run as printed."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import optcov

SOURCES = Path(optcov.__file__).parent


def with_examples() -> Iterator[tuple[str, str]]:
    """Module and full name of every docstring with an example, read from the sources: nothing is imported for it."""
    for path in sorted(SOURCES.rglob("*.py")):
        parts = ("optcov", *path.relative_to(SOURCES).with_suffix("").parts)
        module = ".".join(parts).removesuffix(".__init__")
        yield from ((module, name) for name in _names(ast.parse(path.read_text(encoding="utf-8")), module))


def _names(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[str]:
    if ">>>" in (ast.get_docstring(node) or ""):
        yield name
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _names(child, f"{name}.{child.name}")


EXAMPLES = list(with_examples())


@pytest.mark.parametrize(("module", "name"), EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_the_example_of_a_docstring_runs_as_printed(module, name):
    found = doctest.DocTestFinder().find(importlib.import_module(module))
    (example,) = [test for test in found if test.name == name]
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)


def test_there_are_examples():
    assert len(EXAMPLES) >= 8
