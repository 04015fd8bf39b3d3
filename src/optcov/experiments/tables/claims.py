"""What our numbers say about the paper's claims: each holds, does not hold, or shows no clear difference.

A difference beyond two standard errors counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from optcov.experiments.tables.result import Claim, Entry, Section
from optcov.metrics import jackknife_error

SIGNIFICANT = 2.0  # standard errors


@final
@dataclass(frozen=True)
class Difference:
    """Of two numbers, where the paper claims that it is negative."""

    where: str  # e.g. K = 10
    mean: float
    error: float | None

    def holds(self) -> bool | None:
        """Whether it is negative, if that can be told."""
        if self.error is None or abs(self.mean) <= SIGNIFICANT * self.error:
            return None
        return self.mean < 0

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3g}"
        return f"{self.where}: {self.mean:+.3g}{error}"


def judge(statement: str, differences: Sequence[Difference]) -> Claim:
    """A claim that all differences are negative: one that is positive refutes it, all negative confirm it."""
    verdicts = [difference.holds() for difference in differences]
    holds = False if False in verdicts else None if None in verdicts or not verdicts else True
    return Claim(statement, holds, "; ".join(str(difference) for difference in differences) or "not measured")


def row_differences(section: Section, better: str, worse: str) -> list[Difference]:
    """Differences of two rows of a section, column by column.

    Numbers that were resampled by the same groups, of the same noise, are compared group by group; the errors of others
    are taken as independent.
    """
    rows = {row.name: row for row in section.rows}
    if better not in rows or worse not in rows:
        return []
    found = []
    for column, ours, theirs in zip(section.columns, rows[better].entries, rows[worse].entries, strict=True):
        if ours.value is None or theirs.value is None:
            continue
        found.append(Difference(f"{section.heading}, {column}", ours.value - theirs.value, _error(ours, theirs)))
    return found


def _error(ours: Entry, theirs: Entry) -> float | None:
    if ours.error is None or theirs.error is None:
        return None
    a, b = (entry.details.get("replicates", []) for entry in (ours, theirs))
    if any(a) and [len(part) for part in a] == [len(part) for part in b]:
        return jackknife_error([[x - y for x, y in zip(*parts, strict=True)] for parts in zip(a, b, strict=True)])
    return math.hypot(ours.error, theirs.error)


def judge_pairs(sections: Sequence[Section], pairs: Mapping[str, tuple[str, str]]) -> list[Claim]:
    """For each statement the pair (better row, worse row), over all sections that have both."""
    claims = []
    for statement, (better, worse) in pairs.items():
        differences = [d for section in sections for d in row_differences(section, better, worse)]
        if differences:
            claims.append(judge(statement, differences))
    return claims
