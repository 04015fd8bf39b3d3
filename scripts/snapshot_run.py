"""Look at a training before it ends: the averaged weights of its last checkpoint, as a run that `optcov fit` takes.

python scripts/snapshot_run.py RUN OUT DATA
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file

from optcov.bundle.weights import save_unet
from optcov.data import load
from optcov.fitting.stage1 import DiTShape, UNetShape

PREFIX = "average.network.backbone.module."


def snapshot(run: Path, out: Path, image_shape: tuple[int, int, int]) -> int:
    """Write OUT/unet and OUT/run.json; returns the step."""
    settings = json.loads((run / "run.json").read_text())
    sizes = dict(settings["network"])
    shape = DiTShape if sizes.pop("kind", "unet") == "dit" else UNetShape
    network = shape(**sizes).build(image_shape, settings["seed"])
    last = max((run / "checkpoints").glob("step-*.safetensors"))
    averaged = {name.removeprefix(PREFIX): w for name, w in load_file(last).items() if name.startswith(PREFIX)}
    network.load_state_dict(averaged)
    save_unet(out / "unet", network)
    shutil.copy(run / "run.json", out / "run.json")
    return int(last.stem.removeprefix("step-"))


if __name__ == "__main__":
    run, out, data = map(Path, sys.argv[1:4])
    sys.stdout.write(f"step {snapshot(run, out, load(data).shape)}\n")
