"""README's two commands in a fresh clone with a new environment, as they are and as on an older CPU.

    python benchmarks/fresh_clone.py [--record measurements/fresh-clone.jsonl]

Nothing else should run meanwhile. Each line is a command: the seconds it took with all that it installed, and what it
said last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLDER = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
SETTINGS = {"as it is": {}, "older instructions": OLDER}


def run(target: str, clone: Path, name: str) -> dict[str, Any]:
    """Run a target of the Makefile in a clone, and say how it went."""
    started = time.monotonic()
    words = ["make", target, f"PYTHON={sys.base_prefix}/bin/python3"]
    done = subprocess.run(words, cwd=clone, env={**os.environ, **SETTINGS[name]}, capture_output=True, text=True)
    seconds = round(time.monotonic() - started)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    said = (line.strip(" =") for line in reversed(done.stdout.splitlines()))
    return {
        "command": f"make {target}",
        "CPU": name,
        "exit code": done.returncode,
        "seconds": seconds,
        "said": next((line for line in said if "passed" in line or "wrote" in line), ""),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    """Clone once for each setting, and time both commands there; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in SETTINGS:
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{place}/optcov"], check=True)
            for target in ("demo", "test"):
                lines.append(run(target, Path(place, "optcov"), name))
                print(json.dumps(lines[-1]), flush=True)
                if options.record:
                    options.record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sys.exit(any(line["exit code"] for line in lines))


if __name__ == "__main__":
    main()
