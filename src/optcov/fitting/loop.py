"""One small training loop over Hugging Face Accelerate: an iterator of records, resumable after any kill.

Randomness depends on (seed, step), the learning rate and the EMA decay on the step, everything else is in the
checkpoint: so a run that was killed ends with exactly the weights of one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from optcov import processes
from optcov.fitting.batches import Batches, step_generator
from optcov.fitting.checkpoint import Checkpoint, CheckpointStore, copy_into, optimizer_tensors, restore_optimizer
from optcov.fitting.config import TrainingConfig, TrainingError
from optcov.fitting.journal import Journal
from optcov.fitting.precision import mixed_precision, quick_on_cpu
from optcov.identity import check_unchanged
from optcov.progress import FIRST
from optcov.storage import directory_lock, write_json

Score = Callable[[], float]  # of the averaged weights, which are in the model while it runs; lower is better


@final
@dataclass(frozen=True)
class StepRecord:
    """What the loop tells after a step."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    images_per_second: float
    seconds_left: float


def track_training(records: Iterable[StepRecord], total: int, what: str, show: bool = True) -> Iterator[StepRecord]:
    """Pass the records of a training on, with loss, learning rate, images/s and the time left.

    Where there is no terminal, a line each 50 steps: trainings run for hours, and their logs are read.
    """
    console = Console(stderr=True, quiet=not (show and FIRST))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal or not show)
    with bar as progress:
        task = progress.add_task(what, total=total, state="")
        for record in records:
            state = f"loss {record.loss:.4f}  lr {record.learning_rate:.2e}  {record.images_per_second:.1f} images/s"
            progress.update(task, completed=record.step, state=state)
            if not console.is_terminal and (record.step % 50 == 0 or record.step == total):
                left = f"{record.seconds_left / 60:.1f} min left"
                console.print(f"{what} {record.step}/{total}  {state}  {left}", highlight=False, soft_wrap=True)
            yield record


@final
class Training:
    """An objective in training: parameters that require gradients, their moving average, and the optimizer.

    After `run` is drained, the objective holds the averaged weights: the last ones, or with a score those of the
    checkpoint with the lowest.
    """

    def __init__(
        self,
        objective: nn.Module,
        batches: Batches,
        config: TrainingConfig,
        directory: Path,
        identity: Mapping[str, Any] | None = None,
        score: Score | None = None,
    ):
        self.config, self.batches, self.score = config, batches, score
        self.directory = Path(directory)
        self.store = CheckpointStore(self.directory / "checkpoints", config.keep, config.keep_every)
        self.accelerator = processes.accelerator()
        self.parts = self.accelerator.gradient_accumulation_steps  # of a process's share of a batch, one after another
        _check_shares(config.batch_size, self.accelerator.num_processes, self.parts)
        precision = mixed_precision(self.accelerator)
        self.identity = json.loads(json.dumps({**asdict(config), **precision, **(identity or {})}))
        self.parameters = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.objective, self.optimizer = self.accelerator.prepare(objective, optimizer)
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.step = 0
        self.best: tuple[int, float] | None = None

    def run(self) -> Iterator[StepRecord]:
        """Train to the last step, from the last checkpoint if there is one."""
        # one lock for the run: its other processes write nothing
        with directory_lock(self.directory) if self.accelerator.is_main_process else nullcontext():
            self._resume()
            if self.accelerator.is_main_process:
                write_json(self.directory / "run.json", {**self.identity, "optcov": version("optcov")})
            self.objective.train()
            started, first = time.monotonic(), self.step
            log = self._journal()
            while self.step < self.config.steps:
                self.step += 1
                loss, norm = self._one_step()
                seconds = (time.monotonic() - started) / (self.step - first)
                record = StepRecord(
                    self.step,
                    loss,
                    self.config.learning_rate_at(self.step),
                    norm,
                    self.config.batch_size / seconds,
                    seconds * (self.config.steps - self.step),
                )
                last = self.step == self.config.steps
                if log is not None and (last or self.step % self.config.log_every == 0):
                    log.append(asdict(record))
                if last or self.step % self.config.checkpoint_every == 0:
                    self._checkpoint(log)
                yield record
            average = self.average if self.best is None else self.store.load(self.best[0]).average
            copy_into(self.parameters, average, "averaged weights")

    def _one_step(self) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        self.optimizer.zero_grad()
        loss = self._backward()
        norm = self.accelerator.clip_grad_norm_(list(self.parameters.values()), self.config.clip)
        mean_loss = float(self.accelerator.reduce(loss, "mean"))
        # in float16 an infinite gradient is an ordinary event: the scaler leaves the step out and lowers its scale
        scaled = self.accelerator.scaler is not None
        if not (math.isfinite(mean_loss) and (scaled or math.isfinite(float(norm)))):
            raise TrainingError(self._divergence(mean_loss, float(norm)))
        self.optimizer.step()
        decay = self.config.ema_decay_at(self.step)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.average[name].lerp_(parameter, 1 - decay)
        return mean_loss, float(norm)

    def _backward(self) -> Tensor:
        """Gradients of this process's share of the batch, in as many parts as Accelerate was told; its mean loss."""
        first, count = self.accelerator.process_index * self.parts, self.accelerator.num_processes * self.parts
        batch = self.batches(self.step)
        losses = []
        for part in range(first, first + self.parts):
            quick = quick_on_cpu(self.objective, self.accelerator)
            with self.accelerator.accumulate(self.objective), self._randomness(part), quick:
                loss = self.objective(batch.part(part, count).to(self.accelerator.device)).mean()
                self.accelerator.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @contextmanager
    def _randomness(self, part: int) -> Iterator[None]:
        """Let what is random in a network (dropout) depend on seed, step and part of the batch alone."""
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(step_generator(self.config.seed, f"network {part}", self.step).initial_seed())
            yield

    def _divergence(self, loss: float, norm: float) -> str:
        steps = self.store.steps()
        kept = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no checkpoint yet"
        return (
            f"the loss is {loss} and the gradient's norm {norm} at step {self.step}; {kept} in {self.store.directory}; "
            f"lower the learning rate, or look for bad values in the data"
        )

    def _journal(self) -> Journal | None:
        """The metrics so far, without those that a killed run wrote beyond its last checkpoint."""
        if not self.accelerator.is_main_process:
            return None
        path = self.directory / "metrics.jsonl"
        return Journal(path, keep=lambda line: line.get("step", math.inf) <= self.step)

    def _checkpoint(self, log: Journal | None) -> None:
        if self.score is not None:
            with self.averaged():
                value = float(self.score())
            if not math.isfinite(value):
                raise TrainingError(
                    f"the score of the samples at step {self.step} is {value}; check the score function"
                )
            if log is not None:
                log.append({"step": self.step, "score": value})
            if self.best is None or value < self.best[1]:
                self.best = (self.step, value)
        if self.accelerator.is_main_process:
            names = {parameter: name for name, parameter in self.parameters.items()}
            state = optimizer_tensors(self.optimizer.optimizer, names)
            self.store.save(Checkpoint(self.step, self.parameters, self.average, state, self.identity, self.best))
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        checkpoint = self.store.latest()
        if checkpoint is None:
            return
        self._check_identity(checkpoint.identity)
        copy_into(self.parameters, checkpoint.weights, "weights")
        copy_into(self.average, checkpoint.average, "averaged weights")
        restore_optimizer(self.optimizer.optimizer, self.parameters, checkpoint.optimizer)
        self.step, self.best = checkpoint.step, checkpoint.best
        if self.accelerator.is_main_process:
            self.store.prune(self.best)  # a run that was killed after its last save has not come to it

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        free = {"keep", "keep_every", "log_every"}  # do not touch the result
        if self.score is None:
            free.add("checkpoint_every")  # else it says which weights are judged
        check_unchanged(saved, self.identity, self.directory, TrainingError, ignore=free)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights into the objective for a while, in eval mode."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        copy_into(self.parameters, self.average, "averaged weights")
        self.objective.eval()
        try:
            yield
        finally:
            copy_into(self.parameters, kept, "weights")
            self.objective.train()


def _check_shares(batch_size: int, processes: int, parts: int) -> None:
    """Refuse a batch that cannot be cut evenly: the mean over uneven shares is not the mean over the batch."""
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if parts < 1:
        raise TrainingError(f"{variable} = {parts} must be at least 1")
    if batch_size % (processes * parts):
        shares = f"{processes} processes" if processes > 1 else ""
        shares += f"{' with ' if shares else ''}{parts} parts each ({variable})" if parts > 1 else ""
        raise TrainingError(
            f"a batch of {batch_size} cannot be divided evenly over {shares}; choose a batch size that is a multiple "
            f"of {processes * parts}"
        )
