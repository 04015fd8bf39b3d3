"""`accelerate launch -m optcov COMMAND`: two processes give what one gives, and the death of one ends both.

Sampling is held to the same in test_sampling_cli.py, its noise in test_sampling.py, the library's own loops in
test_fitting_processes.py, the merging of feature statistics in test_metrics.py.
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

import oracle_sweep
from close_outputs import assert_close_results
from optcov.storage import read_tensors
from reliability_runs import Inputs, arguments, results
from two_processes import ENVIRONMENT, LAUNCH

pytestmark = pytest.mark.long


def run(program: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(program, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return ended


def by_one_and_by_two(inputs: Inputs, directory: Path, *command: str) -> tuple[Path, Path, str]:
    """The directories of two runs of a command, by one and by two processes, and what the two said."""
    one, two = inputs.prepare(directory / "one"), inputs.prepare(directory / "two")
    run([sys.executable, "-m", "optcov", *command], one)
    said = run([*LAUNCH, "-m", "optcov", *command], two).stdout
    return one / "out" / "run", two / "out" / "run", said


def bits(table: Path) -> dict[tuple[str, str, int], tuple[float, float]]:
    rows = json.loads(table.read_text())["rows"]
    return {
        (row["kind"], row["covariance"], row["K"]): (row["bits_per_dim"]["mean"], row["bits_per_dim"]["standard_error"])
        for row in rows
    }


def test_a_table_of_likelihoods_by_a_u_net_agrees_to_1e_5(inputs, tmp_path):
    command = (
        "bpd small images.npz --out out/run --images 5 --train-images 6 --times 6 --steps 2,4 --batch-size 2 --json"
    )
    one, two, said = by_one_and_by_two(inputs, tmp_path, *command.split())
    expected, found = bits(one / "table.json"), bits(two / "table.json")
    assert expected.keys() == found.keys()
    for key, (mean, error) in expected.items():  # the error of two images is a difference, and loses digits
        assert max(abs(mean - found[key][0]), abs(error - found[key][1])) < 1e-5 * abs(mean), key
    assert json.loads(said) == json.loads((two / "table.json").read_text())  # one of the processes speaks for both


def test_a_sweep_by_a_closed_form_network_agrees_to_1e_9(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    oracle_sweep.oracle_table(tmp_path / "one")
    run([*LAUNCH, oracle_sweep.__file__, str(tmp_path / "two")], tmp_path)
    one, two = (torch.load(tmp_path / name / "costs.pt", weights_only=True) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert (int(one.pop("ranks")), int(two.pop("ranks"))) == (1, 2)
    for name in one:
        finite = one[name].isfinite()
        assert torch.equal(finite, two[name].isfinite())
        assert torch.allclose(one[name][finite], two[name][finite], rtol=1e-9, atol=0), name


def test_heads_fitted_in_closed_form_agree_to_1e_5(inputs, tmp_path):
    one, two, _ = by_one_and_by_two(inputs, tmp_path, *arguments("fit"))
    for name in ("heads/sn", "heads/npr", "numbers"):
        expected, found = (read_tensors(run / f"{name}.safetensors")[0] for run in (one, two))
        for key, value in expected.items():
            scale = float(value.double().abs().max())
            assert float((value.double() - found[key].double()).abs().max()) <= 1e-5 * scale, (name, key)
    history = [json.loads((run / "provenance.json").read_text()) for run in (one, two)]
    assert_close_results(*history)


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
    assert_close_results(found["sections"], expected["sections"])


def children(pid: int) -> list[int]:
    """Processes that any thread of this process started, in the order of their start."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(int(child) for each in lists for child in each.split())


BEGUN = {  # a file that tells that the work of both processes is under way, and what makes it last
    "train": ("run/checkpoints/step-0000000[3-9]*", ["--steps", "100"]),
    "fit": ("run.work/.lock", ["--images", "4096"]),
    "heads": ("run.work/training/checkpoints/step-*", ["--steps", "200"]),
    "sample": ("run/images/*.png", ["--n", "600"]),
    "bpd": ("run/.lock", ["--images", "20", "--train-images", "24", "--times", "24", "--batch-size", "1"]),
    "table": ("run/scratch/*.lock", ["--images", "20", "--train-images", "24", "--times", "24"]),
}


def start(program: list[str], where: Path, begun: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a job of two processes in a group of its own, and wait until it has begun; returns it and the two."""
    with (where / "said").open("w") as said:
        job = subprocess.Popen(program, cwd=where, env=ENVIRONMENT, stdout=said, stderr=said, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (list((where / "out").glob(begun)) and len(children(job.pid)) == 2):
        assert time.monotonic() < deadline
        assert job.poll() is None, (where / "said").read_text()
        time.sleep(0.02)
    return job, children(job.pid)


def hear_interrupts() -> None:
    """Commands under test hear Ctrl-C also where a shell had it ignored for the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("command", sorted(BEGUN))
def test_the_death_of_a_process_ends_the_job_within_a_minute_and_a_restart_goes_on(inputs, tmp_path, command):
    begun, more = BEGUN[command]
    where, whole = inputs.prepare(tmp_path / "work"), inputs.prepare(tmp_path / "whole")
    program = [*LAUNCH, "-m", "optcov", *arguments(command), *more]
    job, (_, second) = start(program, where, begun)
    os.kill(second, signal.SIGKILL)
    began = time.monotonic()
    assert job.wait(timeout=60) != 0
    assert time.monotonic() - began < 60
    message = (where / "said").read_text()
    assert "exitcode  : -9" in message  # of torch's elastic agent, which names the process too
    assert f"(pid: {second})" in message
    before = results(where)
    run(program, where)
    run(program, whole)
    after, expected = results(where), results(whole)
    assert before != after, "the work was done when it was stopped"
    assert after == expected


@pytest.mark.parametrize("command", ["train", "sample"])
def test_ctrl_c_ends_both_processes_and_a_restart_goes_on(inputs, tmp_path, command):
    """A terminal sends it to every process of the job at once."""
    begun, more = BEGUN[command]
    where = inputs.prepare(tmp_path / "work")
    program = [*LAUNCH, "-m", "optcov", *arguments(command), *more]
    hear_interrupts()
    job, processes = start(program, where, begun)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(timeout=60) != 0
    said = (where / "said").read_text()
    assert said.count("the same command goes on with what is kept in out/run") == 1, said
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
    run(program, where)
    assert not list((where / "out").rglob(".*.part"))  # the agent may end a process while it cleans up after itself
