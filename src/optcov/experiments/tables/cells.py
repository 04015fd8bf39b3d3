"""A table as cells: each computed once, stored at once under a key of its settings, found again by the next run.

A plan is a generator that yields groups of cells and is sent their results, so that a search can choose its next cell
by the last ones; it returns the finished table. Tables that share a directory share cells, and so do processes: each
claims a cell of the group before it computes it, and waits only for cells that others are at.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from optcov import storage

WAIT = 2.0  # seconds between looks at cells that other processes compute
TABLES = ("fid", "timesteps", "bpd", "cost", "iddpm", "repeats", "normalised", "peers")
FIELDS = {"key": str, "label": str, "kind": str, "settings": dict, "result": dict, "checksum": str}  # of a record

Result = dict[str, Any]  # plain JSON values
Records = dict[str, dict[str, Any]]  # by the keys of their cells
Table = TypeVar("Table")
Key = TypeVar("Key")
Plan = Generator[Sequence["Cell"], Mapping[str, Result], Table]  # yields a group, is sent results by the cells' keys
# computes a cell in parts, after each of which it yields the share that is done; the path is its own for scratch files
Compute = Callable[["Cell", Path], Generator[float, None, Result]]


@final
@dataclass(frozen=True)
class Cell:
    """One thing to compute."""

    kind: str  # which computation
    settings: Mapping[str, Any]  # plain JSON values that, with the kind, determine the result
    work: float  # cost in any unit that the cells of a table share, for the time left
    label: str  # for display

    @property
    def key(self) -> str:
        """What the cell is found by: a digest of its settings."""
        text = json.dumps([self.kind, dict(self.settings)], sort_keys=True, allow_nan=False)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


@final
class CellStore:
    """Results on disk: TABLE.jsonl, one record per line, written anew whole with each result; scratch/ for parts.

    A table finds the cells of all tables in its directory, and adds to its own file.
    """

    def __init__(self, directory: Path, table: str):
        self.directory, self.path = Path(directory), Path(directory) / f"{table}.jsonl"
        if self.directory.exists() and not self.directory.is_dir():
            raise storage.StorageError(f"{self.directory} is a file; tables are kept in a directory, give one by --out")
        self._read: dict[Path, tuple[tuple[int, ...], Records]] = {}  # by file: when it was read, and what it held

    def get(self, cell: Cell) -> Result | None:
        """The stored result, if there is one."""
        for path in (self.directory / f"{table}.jsonl" for table in TABLES):
            record = self._records(path).get(cell.key)
            if record is not None:
                result: Result = record["result"]
                return result
        return None

    def put(self, cell: Cell, result: Result, seconds: float) -> None:
        """Store a result, and drop its parts."""
        record = {"key": cell.key, "label": cell.label, "kind": cell.kind, "settings": _plain(cell.settings)}
        record |= {"seconds": seconds, "result": result, "checksum": _checksum(result)}
        with storage.claim(self.directory / ".lock", wait=True):  # processes that share the file add to it in turns
            storage.remove_leftovers(self.directory, [f".{self.path.name}.*.part"])
            records = {**self._records(self.path), cell.key: record}
            lines = sorted(records.values(), key=lambda r: (r["kind"], r["label"], r["key"]))
            content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            storage.write_bytes(self.path, content.encode())
        self.drop_parts(cell)

    def drop_parts(self, cell: Cell) -> None:
        """Remove the parts of a cell whose result is stored."""
        for pattern in (f"{cell.key}*", f".{cell.key}*"):  # the second: what a killed run was writing
            for part in (self.directory / "scratch").glob(pattern):
                part.unlink(missing_ok=True)

    def claim(self, cell: Cell) -> AbstractContextManager[bool]:
        """Whether this process may compute a cell; no other one may meanwhile. Look for its result again then."""
        return storage.claim(self.scratch(cell).with_suffix(".lock"))

    def scratch(self, cell: Cell) -> Path:
        """A path without suffix, for files with parts of this cell."""
        return self.directory / "scratch" / cell.key

    def _records(self, path: Path) -> Records:
        """What a file holds, by key; read again only if it was written since."""
        if not path.exists():
            return {}
        now = path.stat()
        version = (now.st_ino, now.st_mtime_ns, now.st_size)
        if path not in self._read or self._read[path][0] != version:
            self._read[path] = version, read_cells(path)
        return self._read[path][1]


def read_cells(path: Path) -> Records:
    """The records in a file by their keys; a line that is none, or was changed, is refused."""
    records: Records = {}
    for number, line in enumerate(storage.read_text(path).splitlines(), start=1):
        try:
            record = json.loads(line)
            fault = _fault(record)
        except (ValueError, RecursionError) as error:
            fault = f"is not JSON ({error})"
        if fault:
            raise storage.StorageError(f"line {number} of {path} {fault}; remove it to compute its cell again")
        records[record["key"]] = record
    return records


def _fault(record: Any) -> str | None:
    """What is wrong with a record, if anything is."""
    if not (isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in FIELDS.items())):
        return "is not the record of a cell"
    if record["key"] != Cell(record["kind"], record["settings"], 0.0, "").key:
        return "has the key of other settings"
    return None if record["checksum"] == _checksum(record["result"]) else "was changed after it was written"


def results_of(cells: Mapping[Key, Cell]) -> Plan[dict[Key, Result]]:
    """Part of a plan: all of some cells, in whatever order they come."""
    results = yield tuple(cells.values())
    return {key: results[cell.key] for key, cell in cells.items()}


def result_of(cell: Cell) -> Plan[Result]:
    """Part of a plan: a cell that what follows depends on."""
    results = yield (cell,)
    return results[cell.key]


@final
@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    label: str  # the cell at hand
    done: float  # work
    total: float  # estimated where a search decides
    computed: int  # cells of this run
    found: int  # cells that an earlier run had left, or another process computed


@final
class TableRun(Generic[Table]):
    """An iterator over the progress of a plan; `table` is there once it is drained."""

    def __init__(self, plan: Plan[Table], total: float, store: CellStore, compute: Compute):
        self._plan, self.total, self._store, self._compute = plan, max(total, 1.0), store, compute
        self._table: Table | None = None
        self._drained = False
        self._done = 0.0
        self._computed = self._found = 0

    def __iter__(self) -> Iterator[Progress]:
        try:
            cells = next(self._plan)
            while True:
                results = yield from self._group(cells)
                cells = self._plan.send(results)
        except StopIteration as stop:
            self._table = stop.value
            self._drained = True

    @property
    def table(self) -> Table:
        """The result; an error before the run is drained."""
        if not self._drained:
            raise ValueError("the table is not finished; iterate over the run to its end first")
        assert self._table is not None
        return self._table

    def _group(self, cells: Sequence[Cell]) -> Generator[Progress, None, dict[str, Result]]:
        """Results of a group by key: round after round of what is left, until other processes have ended theirs too."""
        results: dict[str, Result] = {}
        waiting = list({cell.key: cell for cell in cells}.values())
        while waiting:
            for cell in waiting:
                result = yield from self._obtain(cell)
                if result is not None:
                    results[cell.key] = result
                    self._done += cell.work
                    yield self._progress(cell, 0.0)
            left = [cell for cell in waiting if cell.key not in results]
            if len(left) == len(waiting):
                time.sleep(WAIT)
            waiting = left
        return results

    def _obtain(self, cell: Cell) -> Generator[Progress, None, Result | None]:
        """Find a result or compute it; None if another process is at it."""
        result = self._store.get(cell)
        if result is None:
            with self._store.claim(cell) as mine:
                if not mine:
                    return None
                result = self._store.get(cell)  # it may have come between the look and the claim
                if result is None:
                    return (yield from self._work(cell))
        self._store.drop_parts(cell)  # a process may have been killed between the result and this
        self._found += 1
        return result

    def _work(self, cell: Cell) -> Generator[Progress, None, Result]:
        began = time.monotonic()
        parts = self._compute(cell, self._store.scratch(cell))
        while True:
            try:
                share = next(parts)
            except StopIteration as stop:
                result: Result = stop.value
                break
            yield self._progress(cell, share)
        self._store.put(cell, result, time.monotonic() - began)
        self._computed += 1
        return result

    def _progress(self, cell: Cell, share: float) -> Progress:
        done = min(self._done + share * cell.work, self.total)
        return Progress(cell.label, done, self.total, self._computed, self._found)


def _plain(content: Mapping[str, Any]) -> Any:
    """As JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(dict(content)))


def _checksum(result: Result) -> str:
    """Of the numbers as they are written: a digit that was damaged on disk would else be shown as measured."""
    return hashlib.sha256(json.dumps(_plain(result), sort_keys=True).encode()).hexdigest()
