"""optcov inside other libraries; each is imported when first used."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "diffusers":
        return importlib.import_module("optcov.integrations.diffusers")
    raise AttributeError(f"module 'optcov.integrations' has no attribute {name!r}")
