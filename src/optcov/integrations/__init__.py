"""optcov inside other libraries; each is imported when first used."""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("diffusers", "azula"):
        return importlib.import_module(f"optcov.integrations.{name}")
    raise AttributeError(f"module 'optcov.integrations' has no attribute {name!r}")
