"""README's two commands were run in a fresh clone, also as on an older CPU: benchmarks/fresh_clone.py."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [json.loads(line) for line in (ROOT / "measurements/fresh-clone.jsonl").read_text().splitlines()]


def test_both_commands_end_well_on_both_kinds_of_cpu():
    ran = {(line["CPU"], line["command"]) for line in LINES if line["exit code"] == 0 and " failed" not in line["said"]}
    assert ran == {(cpu, f"make {target}") for cpu in ("as it is", "older instructions") for target in ("demo", "test")}


def test_from_clone_to_picture_it_takes_less_than_five_minutes_on_two_cores():
    demos = [line for line in LINES if line["command"] == "make demo"]
    assert {line["cores"] for line in demos} == {2}
    assert all(line["seconds"] < 300 for line in demos)
    page = " ".join((ROOT / "docs/reliability.md").read_text(encoding="utf-8").split())
    assert f"`make demo` took {' and '.join(str(line['seconds']) for line in demos)} seconds" in page
