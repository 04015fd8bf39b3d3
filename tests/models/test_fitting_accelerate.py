"""Gradient accumulation and mixed precision, as Accelerate gives them: by environment or by `accelerate launch`.

Accumulation leaves a step the same but for rounding; bf16 stays near float32; both resume exactly.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from optcov.fitting import Batches, NoiseObjective, Training, TrainingConfig, TrainingError, new_heads, train_heads
from optcov.fitting.precision import quick_on_cpu
from optcov.networks import HeadedNetwork
from reliability_runs import arguments, results
from tiny_training import images, same, tiny_network, weights
from two_processes import ENVIRONMENT, LAUNCH

ACCUMULATION, PRECISION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_MIXED_PRECISION"
Set = Callable[..., None]


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch):
    """Set what Accelerate reads from the environment; it keeps what it read first for the life of a process."""

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def choose(parts: int | str | None = None, precision: str | None = None) -> None:
        forget()
        for name, value in ((ACCUMULATION, parts), (PRECISION, precision)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    yield choose
    forget()


CONFIG = {"batch_size": 12, "learning_rate": 1e-3, "checkpoint_every": 2, "ema": 0.5, "log_every": 1}


def stage_1(directory: Path, steps: int = 6) -> tuple[Training, HeadedNetwork]:
    network, config = tiny_network(), TrainingConfig(steps=steps, **CONFIG)
    return Training(NoiseObjective(network), Batches(images(), network.schedule, 12), config, directory), network


def run_stage_1(directory: Path, stop: int | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the steps, and the weights that come out; stopped after a step, or to the end."""
    training, network = stage_1(directory)
    losses = []
    for record in training.run():
        losses.append(record.loss)
        if record.step == stop:
            break
    return losses, weights(network)


def run_stage_2(directory: Path, stop: int | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same of residual heads of every kind."""
    network = tiny_network()
    tasks = new_heads(network, images().x_0(torch.arange(1)), ["sn", "npr", "range"], "residual")
    batches, config = Batches(images(), network.schedule, 12), TrainingConfig(steps=6, **CONFIG)
    losses = []
    for record in train_heads(network, tasks, batches, config, directory):
        losses.append(record.loss)
        if record.step == stop:
            break
    heads = {
        f"{name}.{key}": value.clone() for name, task in tasks.items() for key, value in weights(task.module).items()
    }
    return losses, heads


STAGES = pytest.mark.parametrize("stage", [run_stage_1, run_stage_2], ids=["stage 1", "stage 2"])


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# gradient accumulation


@pytest.mark.parametrize("parts", [2, 3, 12])
def test_the_gradient_of_a_batch_in_parts_is_that_of_the_whole(accelerate, tmp_path, parts):
    gradients = []
    for count in (1, parts):
        accelerate(parts=count)
        training, _ = stage_1(tmp_path)
        training.step = 1
        training._backward()
        gradients.append(torch.cat([p.grad.flatten() for p in training.parameters.values()]))
    whole, accumulated = gradients
    assert float((whole - accumulated).abs().max()) < 1e-6 * float(whole.abs().max())


@STAGES
@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_changes_a_training_by_rounding_only(accelerate, tmp_path, stage, parts):
    """AdamW divides by the size of a gradient, so that the rounding of small ones shows in the weights: 1e-2 of what
    they move by, which is the learning rate per step."""
    accelerate()
    expected, whole = stage(tmp_path / "whole")
    accelerate(parts=parts)
    losses, accumulated = stage(tmp_path / "parts")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert largest_difference(whole, accumulated) < 1e-2 * CONFIG["learning_rate"]


@STAGES
def test_a_stopped_training_with_accumulation_ends_as_one_that_was_not(accelerate, tmp_path, stage):
    accelerate(parts=3)
    _, whole = stage(tmp_path / "whole")
    stage(tmp_path / "stopped", stop=3)  # one step beyond its last checkpoint
    accelerate(parts=3)
    losses, again = stage(tmp_path / "stopped")
    assert len(losses) == 4
    assert same(whole, again)


@pytest.mark.parametrize("parts", [5, 24])
def test_parts_that_do_not_divide_the_batch_are_refused_before_anything_is_written(accelerate, tmp_path, parts):
    accelerate(parts=parts)
    with pytest.raises(TrainingError, match=rf"batch of 12 .*{parts} parts.*{ACCUMULATION}.*multiple of {parts}"):
        stage_1(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parts", ["0", "-2"])
def test_a_number_of_parts_that_is_none_is_refused(accelerate, tmp_path, parts):
    accelerate(parts=parts)
    with pytest.raises(TrainingError, match=rf"{ACCUMULATION} = {parts} .*at least 1"):
        stage_1(tmp_path)


# mixed precision


@STAGES
def test_bf16_trains_and_stays_near_float32(accelerate, tmp_path, stage):
    """bf16 has 8 bits of mantissa, 4e-3 per operation: losses within 2%, no NaN, and weights that stay float32."""
    accelerate()
    expected, exact = stage(tmp_path / "float32")
    accelerate(precision="bf16")
    losses, rounded = stage(tmp_path / "bf16")
    assert all(math.isfinite(loss) for loss in losses)
    assert losses != expected  # it is another precision indeed
    assert losses == pytest.approx(expected, rel=0.02)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in rounded.values())
    assert largest_difference(exact, rounded) < 6 * CONFIG["learning_rate"]


@STAGES
def test_a_stopped_training_in_bf16_ends_as_one_that_was_not(accelerate, tmp_path, stage):
    accelerate(precision="bf16")
    _, whole = stage(tmp_path / "whole")
    stage(tmp_path / "stopped", stop=3)
    accelerate(precision="bf16")
    losses, again = stage(tmp_path / "stopped")
    assert len(losses) == 4
    assert same(whole, again)


def test_bf16_on_a_cpu_leaves_group_norms_in_float32_while_it_trains(accelerate, tmp_path):
    """Their bfloat16 kernel is slower than the float32 one. Afterwards the network is as it was."""
    accelerate(precision="bf16")
    training, network = stage_1(tmp_path)
    seen = []
    norm = next(module for module in network.modules() if isinstance(module, torch.nn.GroupNorm))
    norm.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    training.step = 1
    training._backward()
    with torch.autocast("cpu", torch.bfloat16):
        norm(torch.zeros(1, norm.num_channels, 2, 2, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.bfloat16]


def test_group_norms_with_weights_in_bfloat16_run_in_bf16_on_a_cpu(accelerate):
    """Their weights could not be combined with a float32 input."""
    accelerate()
    norm = torch.nn.GroupNorm(2, 4).bfloat16()
    with quick_on_cpu(norm, Accelerator(cpu=True, mixed_precision="bf16")):
        assert norm(torch.ones(1, 4, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_training_is_not_continued_in_another_precision(accelerate, tmp_path):
    accelerate(precision="bf16")
    run_stage_1(tmp_path, stop=3)
    accelerate()
    with pytest.raises(TrainingError, match=r"the mixed precision changed from bf16 to none"):
        run_stage_1(tmp_path)


# commands


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "heads"])
def test_a_command_takes_both_from_the_environment_and_goes_on(commands, inputs, tmp_path, command):
    """bf16 in two parts each, killed after its first checkpoint and started again: the files of an undisturbed run."""
    environment = {ACCUMULATION: "2", PRECISION: "bf16"}
    record, section = {"train": ("run/run.json", None), "heads": ("run/provenance.json", "fit")}[command]
    whole, killed = inputs.prepare(tmp_path / "whole"), inputs.prepare(tmp_path / "killed")
    ended = commands.run(*arguments(command), cwd=whole, environment=environment)
    assert ended.code == 0, ended.err
    fault = {"of": ["replace"], "at": 4, "how": "kill"}
    assert commands.run(*arguments(command), cwd=killed, environment=environment, fault=fault).code < 0
    ended = commands.run(*arguments(command), cwd=killed, environment=environment)
    assert ended.code == 0, ended.err
    told = json.loads((killed / "out" / record).read_text())
    assert (told[section] if section else told)["mixed_precision"] == "bf16"
    assert results(whole) == results(killed)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({ACCUMULATION: "3"}, "multiple of 3"),
        ({ACCUMULATION: "0"}, "at least 1"),
        ({ACCUMULATION: "many"}, "many"),
        ({PRECISION: "fp16"}, "'fp16' is not available on cpu"),
        ({PRECISION: "half"}, "'half' is not available"),
    ],
)
def test_a_command_refuses_what_cannot_be_in_one_sentence(commands, inputs, tmp_path, environment, words):
    where = inputs.prepare(tmp_path / "train")
    ended = commands.run(*arguments("train"), cwd=where, environment=environment)
    assert ended.code == 2
    said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, ended.err
    assert words in said[0]
    assert "Traceback" not in ended.err
    assert results(where) == {}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_two_processes_with_two_parts_each_train_as_one_without(inputs, tmp_path, precision):
    """The loss curve of 40 steps agrees to 1e-3, in bf16 to 2%."""
    one, two = inputs.prepare(tmp_path / "one"), inputs.prepare(tmp_path / "two")
    command = ["optcov", *arguments("train"), "--steps", "40", "--batch-size", "8"]
    launch = [*LAUNCH, "--gradient_accumulation_steps", "2", "--mixed_precision", precision]
    for where, program in ((one, [sys.executable]), (two, launch)):
        ended = subprocess.run(
            [*program, "-m", *command], cwd=where, env=ENVIRONMENT, capture_output=True, text=True, timeout=900
        )
        assert ended.returncode == 0, ended.stderr
    curves = [losses(where / "out" / "run") for where in (one, two)]
    assert len(curves[0]) == 4
    assert np.allclose(*curves, rtol=1e-3 if precision == "no" else 0.02, atol=0)
