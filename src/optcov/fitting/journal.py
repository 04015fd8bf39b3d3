"""A journal: one JSON document per line, appended as work is done, read again by a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from optcov.fitting.config import TrainingError
from optcov.identity import check_unchanged
from optcov.storage import StorageError, append_line, write_bytes


@final
class Journal:
    """Lines of JSON in a file.

    identity: what the lines belong to; it is the file's first line, and a file with another one is refused.
    keep: lines of an earlier run that are not kept are dropped.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any] | None = None, keep: Callable[[Any], bool] = lambda _line: True
    ):
        self.path = Path(path)
        self._header = [] if identity is None else [json.dumps({"identity": identity}, sort_keys=True)]
        found = list(self._whole_lines())
        if found and identity is not None:
            before = found[0].get("identity")
            check_unchanged(before if isinstance(before, dict) else {}, identity, self.path, TrainingError)
        kept = [json.dumps(line) for line in found[len(self._header) :] if keep(line)]
        write_bytes(self.path, "".join(f"{line}\n" for line in [*self._header, *kept]).encode())

    def read(self) -> list[Any]:
        """What the journal holds so far."""
        return list(self._whole_lines())[len(self._header) :]

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; it is on disk when this returns."""
        append_line(self.path, json.dumps(line, allow_nan=False))

    def _whole_lines(self) -> Iterator[Any]:
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"cannot read {self.path}: {error}") from error
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):  # a killed run may have cut its last line short
                yield self._parse(line)

    def _parse(self, line: str) -> Any:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StorageError(f"{self.path} holds a line that is no JSON: {line[:80]!r}") from error
        if not isinstance(parsed, dict):
            raise StorageError(f"{self.path} holds a line that is no record: {line[:80]!r}")
        return parsed
