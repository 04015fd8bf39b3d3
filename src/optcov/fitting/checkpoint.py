"""Checkpoints of a training: weights, moving average, optimizer state and step, in one file that is whole or absent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.fitting.config import TrainingError
from optcov.storage import StorageError, read_tensors, write_tensors

_NAME = re.compile(r"step-(\d{8})\.safetensors")


@final
@dataclass(frozen=True)
class Checkpoint:
    """The state after a step; every tensor by the name of its parameter."""

    step: int
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]  # "<parameter>/<quantity>"
    identity: Mapping[str, Any]  # what a run must share to be continued
    best: tuple[int, float] | None = None  # step and score of the best checkpoint so far


@final
class CheckpointStore:
    """A directory of checkpoints, with a rule which of them stay."""

    def __init__(self, directory: Path, keep: int, keep_every: int = 0):
        self.directory = Path(directory)
        self.keep, self.keep_every = keep, keep_every

    def path(self, step: int) -> Path:
        """File of the checkpoint after a step."""
        return self.directory / f"step-{step:08d}.safetensors"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those that the rule does not keep."""
        tensors = {
            f"{group}.{name}": tensor
            for group in ("weights", "average", "optimizer")
            for name, tensor in getattr(checkpoint, group).items()
        }
        state = {"step": checkpoint.step, "identity": checkpoint.identity, "best": checkpoint.best}
        write_tensors(self.path(checkpoint.step), tensors, {"state": json.dumps(state, allow_nan=False)})
        self.prune(checkpoint.best)

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint after a step."""
        tensors, metadata = read_tensors(self.path(step))
        try:
            state = json.loads(metadata["state"])
            best = None if state["best"] is None else (int(state["best"][0]), float(state["best"][1]))
            saved_step, identity = int(state["step"]), dict(state["identity"])
        except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise StorageError(f"{self.path(step)} is not a checkpoint of a training: {error!r}") from error
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            if group not in groups:
                raise StorageError(f"{self.path(step)} is not a checkpoint of a training: it holds {name!r}")
            groups[group][rest] = tensor
        return Checkpoint(saved_step, **groups, identity=identity, best=best)

    def latest(self) -> Checkpoint | None:
        """The last checkpoint, or None in an empty directory."""
        steps = self.steps()
        return self.load(steps[-1]) if steps else None

    def prune(self, best: tuple[int, float] | None) -> None:
        """Remove the checkpoints that the rule does not keep; best is the step and score of one that stays."""
        steps = self.steps()
        for step in steps[: -self.keep]:
            if (best is None or step != best[0]) and not (self.keep_every and step % self.keep_every == 0):
                self.path(step).unlink(missing_ok=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Tensor]:
    """An optimizer's state by parameter name, as "<parameter>/<quantity>"."""
    return {
        f"{names[parameter]}/{quantity}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> None:
    """Put an optimizer's state back, in the memory layout that the optimizer itself would choose."""
    for key, value in saved.items():
        name, _, quantity = key.rpartition("/")
        if name not in parameters:
            raise TrainingError(f"the optimizer's state of the checkpoint belongs to another model: {name!r}")
        parameter = parameters[name]
        place = (
            torch.empty_like(parameter) if value.shape == parameter.shape and value.ndim else torch.empty_like(value)
        )
        optimizer.state[parameter][quantity] = place.copy_(value)


def copy_into(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str) -> None:
    """Overwrite parameters in place; names and shapes must agree."""
    if parameters.keys() != saved.keys():
        different = sorted(parameters.keys() ^ saved.keys())
        raise TrainingError(f"the {what} of the checkpoint belong to another model: {different[:5]} are not in both")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != saved[name].shape:
                raise TrainingError(
                    f"the {what} of the checkpoint belong to another model: {name} has shape "
                    f"{tuple(saved[name].shape)} there and {tuple(parameter.shape)} here"
                )
            parameter.copy_(saved[name])
