"""`accelerate launch -m optcov COMMAND`: two processes give what one gives, and the death of one ends both.

Sampling is held to the same in test_sampling_cli.py, its noise in test_sampling.py, the library's own loops in
test_training_processes.py, the merging of feature statistics in test_metrics.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from optcov import ForwardProcess, ReverseProcess, Schedule, oracle
from optcov.likelihood import Sweep, gather
from optcov.storage import read_tensors
from reliability_runs import Inputs, arguments

pytestmark = pytest.mark.long
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu", "-m"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "COLUMNS": "300"}


def run(program: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(program, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return ended


def by_one_and_by_two(inputs: Inputs, directory: Path, *command: str) -> tuple[Path, Path, str]:
    """The directories of two runs of a command, by one and by two processes, and what the two said."""
    one, two = inputs.prepare(directory / "one"), inputs.prepare(directory / "two")
    run([sys.executable, "-m", "optcov", *command], one)
    said = run([*LAUNCH, "optcov", *command], two).stdout
    return one / "out" / "run", two / "out" / "run", said


def bits(table: Path) -> dict[tuple[str, str, int], tuple[float, float]]:
    rows = json.loads(table.read_text())["rows"]
    return {
        (row["kind"], row["design"], row["K"]): (row["bits_per_dim"]["mean"], row["bits_per_dim"]["standard_error"])
        for row in rows
    }


def test_a_table_of_likelihoods_by_a_u_net_agrees_to_1e_5(inputs, tmp_path):
    command = (
        "bpd small images.npz --out out/run --images 5 --train-images 6 --times 6 --steps 2,4 --batch-size 2 --json"
    )
    one, two, said = by_one_and_by_two(inputs, tmp_path, *command.split())
    expected, found = bits(one / "table.json"), bits(two / "table.json")
    assert expected.keys() == found.keys()
    assert max(abs(a - b) / abs(a) for k in expected for a, b in zip(expected[k], found[k], strict=True)) < 1e-5
    assert json.loads(said) == json.loads((two / "table.json").read_text())  # one of the processes speaks for both


def oracle_table(directory: Path, rank: int = 0, ranks: int = 1) -> None:
    """A sweep by a closed-form network, over the processes of this run; the first writes the sums."""
    data = oracle.GaussianMixture([0.5, 0.5], [[-0.5] * 4, [0.4] * 4], [0.02, 0.05])
    schedule = Schedule.linear(50)
    process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), data_range=None)
    sweep = Sweep(process, data.sample(24).double(), shard=(rank, ranks), batch_size=5)
    for _ in sweep:
        pass
    table = gather(sweep.table, ranks)
    if rank == 0:
        costs = {name: torch.as_tensor(np.asarray(table.costs(name))) for name in table.designs}
        torch.save(costs, directory / "costs.pt")


def test_a_sweep_by_a_closed_form_network_agrees_to_1e_9(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    oracle_table(tmp_path / "one")
    run([*LAUNCH[:-1], __file__, str(tmp_path / "two")], Path(__file__).parent)
    one, two = (torch.load(tmp_path / name / "costs.pt", weights_only=True) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        finite = one[name].isfinite()
        assert torch.equal(finite, two[name].isfinite())
        assert torch.allclose(one[name][finite], two[name][finite], rtol=1e-9, atol=0), name


def test_heads_fitted_in_closed_form_agree_to_1e_6(inputs, tmp_path):
    one, two, _ = by_one_and_by_two(inputs, tmp_path, *arguments("fit"))
    for name in ("heads/sn", "heads/npr", "numbers"):
        expected, found = (read_tensors(run / f"{name}.safetensors")[0] for run in (one, two))
        for key, value in expected.items():
            scale = float(value.double().abs().max())
            assert float((value.double() - found[key].double()).abs().max()) <= 1e-6 * scale, (name, key)
    assert json.loads((one / "provenance.json").read_text()) == json.loads((two / "provenance.json").read_text())


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_curve_agrees_to_1e_3(inputs, tmp_path):
    """--batch-size counts the images of all processes, so that two of them take half as many each."""
    command = [*arguments("train"), "--steps", "40", "--batch-size", "8"]
    one, two, _ = by_one_and_by_two(inputs, tmp_path, *command)
    assert len(losses(one)) == 4
    assert np.allclose(losses(one), losses(two), rtol=1e-3, atol=0)


def test_heads_train_beside_heads_that_the_bundle_has(inputs, tmp_path):
    """The bundle's old heads get no gradient, for which the processes would wait in vain."""
    one, two, _ = by_one_and_by_two(inputs, tmp_path, *arguments("heads"))
    expected, found = (read_tensors(run / "heads" / "npr.safetensors")[0] for run in (one, two))
    assert all(torch.allclose(expected[key], found[key], rtol=1e-3, atol=1e-5) for key in expected)


def test_a_table_of_the_paper_is_the_same(inputs, tmp_path):
    one, two, _ = by_one_and_by_two(inputs, tmp_path, *arguments("table"))
    expected, found = (json.loads((run / "bpd.json").read_text()) for run in (one, two))
    assert expected["sections"] == found["sections"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_death_of_a_process_ends_the_job_within_a_minute_and_a_restart_goes_on(inputs, tmp_path):
    command = [*arguments("train"), "--steps", "100"]
    where = inputs.prepare(tmp_path / "work")
    program = [*LAUNCH, "optcov", *command]
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(program, cwd=where, env=ENVIRONMENT, stdout=said, stderr=said)
    deadline = time.monotonic() + 300
    while not list((where / "out" / "run" / "checkpoints").glob("step-0000000[3-9]*")):
        assert time.monotonic() < deadline
        assert job.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.02)
    os.kill(children(job.pid)[1], signal.SIGKILL)
    began = time.monotonic()
    assert job.wait(timeout=60) != 0
    assert time.monotonic() - began < 60
    message = (tmp_path / "said").read_text()
    assert "exitcode  : -9" in message  # of torch's elastic agent, which names the process too
    reached = max(int(p.name[5:13]) for p in (where / "out" / "run" / "checkpoints").glob("step-*"))
    assert reached < 100, "the training was nearly done when it was killed"
    run(program, where)
    whole = inputs.prepare(tmp_path / "whole")
    run(program, whole)
    name = "out/run/unet/diffusion_pytorch_model.safetensors"
    assert (where / name).read_bytes() == (whole / name).read_bytes()


if __name__ == "__main__":
    from accelerate import PartialState

    state = PartialState(cpu=True)
    oracle_table(Path(sys.argv[1]), state.process_index, state.num_processes)
