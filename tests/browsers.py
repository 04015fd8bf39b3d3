"""The browser that tests of pages open: Debian's chromium, or another one of its kind."""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


def find_chromium() -> str | None:
    """Its program; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)
