"""benchmarks/load.py on a small scale: shards keep a directory small, and memory does not grow with the images."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def test_memory_stays_flat_and_a_directory_small_over_many_images(tmp_path, monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "load.py"
    spec = importlib.util.spec_from_file_location("load_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "load_benchmark", module)
    spec.loader.exec_module(module)
    load = module.sample_and_score(5000, tmp_path)
    assert load.files == 1 + -(-5000 // module.BATCH)  # run.json and the shards
    assert load.memory_late - load.memory_early < 30  # MB
