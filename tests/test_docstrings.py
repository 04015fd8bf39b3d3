"""The examples in docstrings run as printed."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import optcov

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(optcov.__path__, "optcov.") if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(found) >= 8
