"""One small training loop over Hugging Face Accelerate: an iterator of records, resumable after any kill.

Randomness depends on (seed, step), the learning rate and the EMA decay on the step, everything else is in the
checkpoint: so a run that was killed ends with exactly the weights of one that was not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import nn

from optcov.storage import directory_lock
from optcov.training.batches import Batches
from optcov.training.checkpoint import (
    Checkpoint,
    CheckpointStore,
    copy_into,
    optimizer_tensors,
    restore_optimizer,
)
from optcov.training.config import TrainingConfig, TrainingError
from optcov.training.journal import Journal

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
        self.identity = json.loads(json.dumps({**asdict(config), **(identity or {})}))
        self.accelerator = Accelerator()
        if config.batch_size % self.accelerator.num_processes:
            raise TrainingError(
                f"a batch of {config.batch_size} cannot be shared by {self.accelerator.num_processes} processes evenly"
            )
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
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        batch = self.batches(self.step).part(rank, processes).to(self.accelerator.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        loss = self.objective(batch).mean()
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(list(self.parameters.values()), self.config.clip)
        mean_loss = float(self.accelerator.reduce(loss.detach(), "mean"))
        if not (math.isfinite(mean_loss) and math.isfinite(float(norm))):
            raise TrainingError(self._divergence(mean_loss, float(norm)))
        self.optimizer.step()
        decay = self.config.ema_decay_at(self.step)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.average[name].lerp_(parameter, 1 - decay)
        return mean_loss, float(norm)

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
        return Journal(path, keep=lambda line: line["step"] <= self.step)

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

    def _check_identity(self, saved: Mapping[str, Any]) -> None:
        free = {"checkpoint_every", "keep", "keep_every", "log_every"}  # do not touch the result
        different = [key for key in self.identity if key not in free and saved.get(key) != self.identity[key]]
        if different:
            key = different[0]
            raise TrainingError(
                f"{self.directory} holds a training with {key} = {saved.get(key)}, not {self.identity[key]}; "
                f"continue it with its own settings, or choose another directory"
            )

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
