"""The error of everything that is saved and loaded here."""

from __future__ import annotations

from optcov.storage import StorageError


class BundleError(StorageError):
    """A bundle cannot be read, written or used; the message names the file and says why."""
