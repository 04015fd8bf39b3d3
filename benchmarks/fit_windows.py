"""Calibration of a head that was fitted on windows of the features, beside one that was fitted on whole images.

    python benchmarks/fit_windows.py MODEL DATA --record measurements/fit-windows.jsonl

MODEL is what `optcov fit` takes. Where the features of all images do not fit into their room, each image keeps a window
of them. The room is made small here, so that a small network needs windows, too. A line of JSON per room.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import optcov
from optcov.fitting import stage2


def main() -> None:
    """Fit once per room, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--rooms", type=int, nargs="+", default=(2048, 128, 32), help="MB")
    parser.add_argument("--record", type=Path, help="write the results to this file, a line of JSON each")
    options = parser.parse_args()
    lines = []
    for room in options.rooms:
        stage2.CACHE_BYTES = room * 2**20
        found = optcov.fit(options.model, options.data, heads=("npr",)).provenance["calibration"]["npr"]
        lines.append(json.dumps({"room in MB": room, "ratio": found["ratio"], "standard error": found["error"]}))
        print(lines[-1], flush=True)
    if options.record is not None:
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
