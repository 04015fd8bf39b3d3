"""`accelerate launch` with two processes on CPUs.

`--cpu` would start a single one, whatever `--num_processes` says: without MPI, Accelerate's launcher for several
processes is the one that it calls multi_gpu, and the environment tells it to use CPUs.
"""

from __future__ import annotations

import os
import sys

_OPTIONS = "--multi_gpu --num_processes 2 --num_machines 1 --dynamo_backend no --main_process_port 0"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", *_OPTIONS.split()]  # then a script, or -m and a module
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "COLUMNS": "300"}
