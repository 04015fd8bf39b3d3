"""A ceiling on the memory that reading a foreign file may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/statm")
_DATA_PAGES = 5  # field of the status: pages of data, which RLIMIT_DATA counts


@contextmanager
def limited_growth(extra: int) -> Iterator[None]:
    """Let this process grow by so many bytes; beyond, an allocation fails instead of filling the machine.

    Even a pickle of nothing but tensors can ask for any amount: it may call bytearray, or encode one string over
    and over. The limit is the whole process's, so reading is the only thing to do inside. Where the system does
    not tell how large the process is (other than Linux), there is no limit.
    """
    if not _STATUS.exists():
        yield
        return
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(_STATUS.read_text().split()[_DATA_PAGES]) * os.sysconf("SC_PAGE_SIZE")
    given = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([used + extra, *given]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
