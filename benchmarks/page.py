"""The page of benchmarks: measure what has no line yet, keep it as lines, and write docs/benchmarks.md from them.

    python benchmarks/page.py                       what has no line yet
    python benchmarks/page.py --since 2026-11-18    also what was last measured before that day
    python benchmarks/page.py --only-write          the page from the lines, nothing measured

Use an otherwise idle machine: a ratio means the same under load, but its interval is wide. All of it takes about a
quarter of an hour. Each line is kept when it is measured, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES = ROOT / "docs" / "benchmarks.md", ROOT / "measurements" / "benchmarks.jsonl"
BEGIN, END = "<!-- made by benchmarks/page.py: {} -->", "<!-- /made: {} -->"
MEMORY = "fit_memory"
# glibc then keeps large blocks instead of returning them to the system: fresh pages cost more than a head does
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
ROUNDS, SECONDS = 201, 40.0  # of one benchmark, at most

Line = dict[str, Any]


def read(path: Path = LINES) -> dict[str, Line]:
    """What was measured, by the name of the benchmark."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}


def due(found: Mapping[str, Line], since: str) -> list[str]:
    """Benchmarks without a line, or with one of a day before."""
    from optcov.experiments.bench import BENCHMARKS

    return [name for name in (*BENCHMARKS, MEMORY) if name not in found or found[name]["date"] < since]


def measure(name: str) -> Line:
    """One line: what was found, when and on what."""
    from optcov.experiments.bench import BenchSize, run_benchmarks
    from optcov.experiments.timing import machine

    day = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), **machine()}
    if name == MEMORY:
        import fit_memory

        return {"name": name, **fit_memory.measure(), **day}
    (result,) = run_benchmarks([name], BenchSize(rounds=ROUNDS, seconds=SECONDS))
    return {**result.to_json(), **day}


def keep(found: Mapping[str, Line], path: Path = LINES) -> None:
    """Write all lines, in the order of the page."""
    from optcov import storage
    from optcov.experiments.bench import BENCHMARKS

    known = [found[name] for name in (*BENCHMARKS, MEMORY) if name in found]
    storage.write_bytes(path, "".join(json.dumps(line) + "\n" for line in known).encode())


def parts(found: Mapping[str, Line]) -> dict[str, str]:
    """What the page holds, by the name of its place."""
    ratios = [line for name, line in found.items() if name != MEMORY]
    machines = {
        f"{line['processor']}; torch {line['versions']['torch']}, diffusers {line['versions']['diffusers']}"
        for line in ratios
    }
    header = "| name | our work / compared with | ratio [95 % interval] | bound | ms | peak, MB | date |"
    rows = [header, "|---|---|---|---:|---:|---:|---|", *map(_row, ratios)]
    made = {"machine": "Measured on: " + ". ".join(sorted(machines)) + ".", "ratios": "\n".join(rows)}
    if MEMORY in found:
        made["memory"] = _memory(found[MEMORY])
    return made


def _row(line: Line) -> str:
    cells = (
        f"`{line['name']}`",
        f"{line['ours']} / {line['theirs']}",
        f"{line['ratio']:.3f} [{line['low']:.3f}, {line['high']:.3f}]",
        "" if line["bound"] is None else f"{line['bound']:g}, {_verdict(line)}",
        f"{1000 * line['ours_seconds']:.0f} / {1000 * line['theirs_seconds']:.0f}",
        f"{line['peak_megabytes']:.0f}",
        line["date"],
    )
    return "| " + " | ".join(cells) + " |"


def _verdict(line: Line) -> str:
    return "holds" if line["high"] <= line["bound"] else "**broken**" if line["low"] > line["bound"] else "undecided"


def _memory(line: Line) -> str:
    rows = [f"| {room} MB | {low:.0f} to {high:.0f} MB |" for room, (low, high) in line["more_megabytes"].items()]
    return "\n".join(
        [
            f"Measured on {line['date']}. A forward pass of {line['batch']} images peaks at "
            f"{line['forward_megabytes']:.0f} MB.",
            "",
            "| room for features | peak over the forward pass |",
            "|---:|---:|",
            *rows,
        ]
    )


def inserted(page: str, made: Mapping[str, str]) -> str:
    """The page with its parts in their places."""
    for name, part in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        page = f"{page.split(begin)[0]}{begin}\n{part}\n{end}{page.split(end)[1]}"
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is due, one line after the other; then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="", help="measure again what was measured before this day, as 2026-11-20")
    parser.add_argument("--only-write", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    found = read()
    for name in [] if options.only_write else due(found, options.since):
        print(f"{name} ...", flush=True)
        found[name] = measure(name)
        keep(found)
    PAGE.write_text(inserted(PAGE.read_text(encoding="utf-8"), parts(read())), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    main()
