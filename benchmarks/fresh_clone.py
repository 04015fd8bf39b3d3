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

ROOT = Path(__file__).resolve().parents[1]
OLDER = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
SETTINGS = {"as it is": {}, "older instructions": OLDER}


def main() -> None:
    """Clone once for each setting, and time both commands there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    lines = []
    for name, settings in SETTINGS.items():
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{place}/optcov"], check=True)
            for target in ("demo", "test"):
                started = time.monotonic()
                done = subprocess.run(
                    ["make", target, f"PYTHON={sys.base_prefix}/bin/python3"],
                    cwd=f"{place}/optcov",
                    env={**os.environ, **settings},
                    capture_output=True,
                    text=True,
                )
                said = [line for line in done.stdout.splitlines() if line.strip()]
                seconds = round(time.monotonic() - started)
                day = time.strftime("%Y-%m-%d", time.gmtime())
                last = next((line for line in reversed(said) if "passed" in line or "wrote" in line), "nothing")
                result = {"command": f"make {target}", "CPU": name, "exit code": done.returncode, "seconds": seconds}
                lines.append(json.dumps({**result, "said": last.strip(" ="), "cores": os.cpu_count(), "date": day}))
                print(lines[-1], flush=True)
                if done.returncode:
                    print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    if options.record:
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
