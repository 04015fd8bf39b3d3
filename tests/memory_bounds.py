"""A bound on the memory that a piece of a test may take, whatever peak the tests before it have left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optcov.experiments.timing import peak_memory


@contextmanager
def memory_below(megabytes: float) -> Iterator[None]:
    """Fail if the resident size grows by so much inside the block, even for a moment."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the size of now
    before = peak_memory()
    yield
    assert peak_memory() - before < megabytes
