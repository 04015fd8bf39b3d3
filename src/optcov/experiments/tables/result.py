"""A finished table: sections of rows and columns, our numbers with their errors beside the paper's."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

MOST_DECIMALS = 15


def is_number(value: object) -> bool:
    """Whether something is a finite number, and one that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


@final
@dataclass(frozen=True)
class Entry:
    """One number of ours, or a text where there is none, with the paper's."""

    value: float | None = None
    error: float | None = None  # standard error, or what the table's notes say
    paper: float | None = None
    text: str | None = None  # shown instead of the value, or the reason why there is none
    paper_text: str | None = None
    best: bool = False
    details: dict[str, Any] = field(default_factory=dict)  # what else was measured, for JSON

    def __post_init__(self) -> None:
        for number in (self.value, self.error, self.paper):
            if number is not None and not is_number(number):
                raise ValueError(f"an entry of a table is a finite number or None, not {number!r}")
        if self.error is not None and self.error < 0:
            raise ValueError(f"a standard error is not negative, as {self.error!r} is")
        if not isinstance(self.details, dict):
            raise ValueError(f"the details of an entry have names, but got {self.details!r}")

    def ours(self, decimals: int) -> str:
        """Our number with its error, for display."""
        if self.text is not None or self.value is None:
            return self.text or "-"
        error = "" if self.error is None else f" ± {self.error:.{decimals}f}"
        return f"{self.value:.{decimals}f}{error}"

    def published(self) -> str:
        """The paper's number, with the decimals of its tables; empty if it has none."""
        if self.paper_text is not None:
            return self.paper_text
        return "" if self.paper is None else f"{self.paper:.2f}"


@final
@dataclass(frozen=True)
class Row:
    """A method; rows of one group compete for the best number of a column."""

    name: str
    entries: tuple[Entry, ...]
    group: str = ""


@final
@dataclass(frozen=True)
class Section:
    """Rows with the same columns."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    paper_setting: str | None = None  # the paper's setting that its numbers are from
    decimals: int = 2

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.entries) != len(self.columns):
                raise ValueError(f"row {row.name!r} has {len(row.entries)} entries for {len(self.columns)} columns")

    def with_best(self) -> Section:
        """Mark the least value of each column in each group that has at least two of them."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        least: dict[tuple[str, int], float] = {}
        for name, rows in groups.items():
            for column in range(len(self.columns)):
                values = [v for row in rows if (v := row.entries[column].value) is not None]
                if len(values) > 1:
                    least[name, column] = min(values)

        def marked(row: Row) -> Row:
            entries = [
                replace(entry, best=entry.value is not None and entry.value == least.get((row.group, column)))
                for column, entry in enumerate(row.entries)
            ]
            return replace(row, entries=tuple(entries))

        return replace(self, rows=tuple(marked(row) for row in self.rows))


@final
@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what our numbers say about it."""

    statement: str
    holds: bool | None  # None: our errors do not allow to tell
    evidence: str

    def __post_init__(self) -> None:
        if self.holds not in (True, False, None):
            raise ValueError(f"a claim holds (True), does not (False), or is unclear (None), not {self.holds!r}")

    @property
    def verdict(self) -> str:
        """In words."""
        return {True: "holds", False: "does not hold", None: "no clear difference"}[self.holds]


@final
@dataclass(frozen=True)
class TableResult:
    """What a command writes and a report shows."""

    name: str
    title: str
    quantity: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    made_by: dict[str, Any] = field(default_factory=dict)  # command, versions, machine, settings

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(content: Any) -> TableResult:
        """Read back; a file that is no table is refused."""
        try:
            json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair could not be shown
            sections = tuple(_section(section) for section in content["sections"])
            claims = tuple(Claim(**claim) for claim in content["claims"])
            notes, made_by = _texts(content["notes"]), dict(content["made_by"])
            _texts([content["name"], content["title"], content["quantity"]])
            _texts([text for claim in claims for text in (claim.statement, claim.evidence)])
            return TableResult(
                **{**content, "sections": sections, "claims": claims, "notes": notes, "made_by": made_by}
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"this is not the record of a table (optcov table NAME writes NAME.json): {error}"
            ) from error


def _section(content: Any) -> Section:
    rows = tuple(_row(row) for row in content["rows"])
    _texts([content["heading"], content["paper_setting"] or ""])
    _texts([text for row in rows for text in (row.name, row.group)])
    if content["decimals"] not in range(MOST_DECIMALS + 1):
        raise ValueError(f"{content['decimals']!r} is no number of decimals")
    return Section(**{**content, "columns": _texts(content["columns"]), "rows": rows})


def _row(content: Any) -> Row:
    return Row(**{**content, "entries": tuple(_entry(entry) for entry in content["entries"])})


def _entry(content: Any) -> Entry:
    entry = Entry(**content)
    _texts([entry.text or "", entry.paper_text or ""])
    times = entry.details.get("times") or []
    if not (isinstance(times, list) and all(is_number(t) for t in times)):
        raise ValueError(f"{times!r} are no times of a trajectory")
    return entry


def _texts(content: Any) -> tuple[str, ...]:
    wrong = [text for text in content if not isinstance(text, str)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} stands where a text should")
    return tuple(content)
