"""Stage 1: train a noise predictor on images (Eq. 7), in a run directory. A killed run resumes from it.

run.json        every setting, the checksum of the data, the version of the package
metrics.jsonl   loss, learning rate, gradient norm and speed by step
checkpoints/    what a restart needs
unet/           the averaged weights in diffusers' format, written after the last step
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from optcov.bundle.weights import check_unet, load_unet, save_head, save_unet
from optcov.data import ImageSet
from optcov.fitting.batches import Batches, Conditioned, Labels, NoiseLevels
from optcov.fitting.config import TrainingConfig, TrainingError
from optcov.fitting.heads import new_heads
from optcov.fitting.loop import StepRecord, Training
from optcov.fitting.objectives import JointObjective, NoiseObjective
from optcov.fitting.score import SampleScore, ScoreSettings
from optcov.identity import known_by
from optcov.networks import Backbone, HeadedNetwork, fingerprint
from optcov.networks.dit import build_dit
from optcov.networks.unet import build_unet
from optcov.prediction import condition_of
from optcov.schedule import Schedule

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "vp_sde": Schedule.vp_sde,
    "linear": Schedule.linear,
    "cosine": Schedule.cosine,
    "flow": Schedule.flow,
}


@final
@dataclass(frozen=True)
class UNetShape:
    """Size of a UNet2DModel; if patch_size is above 1, it sees patches. See `optcov.networks.unet.build_unet`."""

    channels: Sequence[int] = (32, 64, 96)
    layers_per_block: int = 1
    attention_levels: int = 1
    groups: int = 8
    head_dim: int = 32
    dropout: float = 0.0
    classes: int = 0  # labels it is conditioned on; 0: none
    patch_size: int = 1

    def __post_init__(self) -> None:
        smallest = {
            "channels": 1,
            "layers_per_block": 1,
            "attention_levels": 0,
            "groups": 1,
            "head_dim": 1,
            "classes": 0,
            "patch_size": 1,
        }
        for name, least in smallest.items():
            value = getattr(self, name)
            if min(value if name == "channels" else (value,), default=0) < least:
                raise TrainingError(f"{name} = {value} of the U-Net must be at least {least}")
        if self.attention_levels > len(self.channels):
            raise TrainingError(
                f"attention_levels = {self.attention_levels} of the U-Net exceed its {len(self.channels)} levels"
            )
        odd = [width for width in self.channels if width % self.groups]
        if odd:
            raise TrainingError(f"groups = {self.groups} of the U-Net do not divide its {odd[0]} channels")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"dropout = {self.dropout} of the U-Net is outside [0, 1)")

    def build(self, image_shape: Sequence[int], seed: int) -> nn.Module:
        """A fresh network for images (C, H, W)."""
        return build_unet(image_shape, **asdict(self), seed=seed)

    def settings(self) -> dict[str, Any]:
        """The shape as a run records it. Classes and patches are left out if unused, so that older runs fit."""
        known = {**asdict(self), "channels": list(self.channels)}
        usual = {"classes": 0, "patch_size": 1}
        return {name: value for name, value in known.items() if value != usual.get(name)}


@final
@dataclass(frozen=True)
class DiTShape:
    """Size of a DiTTransformer2DModel; see `optcov.networks.dit.build_dit`."""

    patch_size: int = 4
    width: int = 128
    layers: int = 6
    head_dim: int = 32
    dropout: float = 0.0
    classes: int = 0  # labels it is conditioned on; a DiT needs some

    def __post_init__(self) -> None:
        for name in ("patch_size", "width", "layers", "head_dim"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} = {getattr(self, name)} of the DiT must be at least 1")
        if self.classes < 1:
            raise TrainingError("a DiT is conditioned on labels; say how many classes there are (--labels 10)")
        if self.width % self.head_dim:
            raise TrainingError(f"head_dim = {self.head_dim} of the DiT does not divide its width of {self.width}")
        if not 0 <= self.dropout < 1:
            raise TrainingError(f"dropout = {self.dropout} of the DiT is outside [0, 1)")

    def build(self, image_shape: Sequence[int], seed: int) -> nn.Module:
        """A fresh network for images (C, H, H)."""
        return build_dit(image_shape, **asdict(self), seed=seed)

    def settings(self) -> dict[str, Any]:
        """The shape as a run records it."""
        return {"kind": "dit", **asdict(self)}


def make_schedule(name: str) -> Schedule:
    """Look a schedule up by its name."""
    if name not in SCHEDULES:
        raise TrainingError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]()


def _check_prediction(prediction_type: str, schedule: str) -> None:
    """Refuse to learn the noise alone where the last time has nothing else."""
    times = make_schedule(schedule)
    if prediction_type == "epsilon" and bool(times.alpha_bar(times.final_time) == 0):
        raise TrainingError(
            f"a network that predicts the noise says nothing of the image at the last time of the schedule "
            f"{schedule!r}; use --prediction flow_prediction, v_prediction or sample"
        )


def fill(unet: nn.Module, start: Path) -> None:
    """Copy the weights of a stored network into another one of the same shape."""
    start = Path(start)
    stored = load_unet(start / "unet" if (start / "unet").is_dir() else start).state_dict()
    own = unet.state_dict()
    other = [name for name in own if name not in stored or stored[name].shape != own[name].shape]
    other += [name for name in stored if name not in own]
    if other:
        raise TrainingError(
            f"the network of {start} has another shape ({other[0]} and {len(other) - 1} more weights differ); use "
            f"the options that it was trained with"
        )
    unet.load_state_dict({name: weight.to(own[name]) for name, weight in stored.items()})


def label_checksum(images: ImageSet) -> str:
    """SHA-256 of the labels, in hexadecimal; without labels, of nothing."""
    labels = torch.empty(0, dtype=torch.int64) if images.labels is None else images.labels
    return hashlib.sha256(labels.numpy().tobytes()).hexdigest()


def train_noise_predictor(
    images: ImageSet,
    directory: Path,
    config: TrainingConfig,
    shape: UNetShape | DiTShape,
    schedule: str = "vp_sde",
    flip: bool = True,
    score: ScoreSettings | None = None,
    joint_heads: Sequence[str] = (),
    *,
    prediction_type: str = "epsilon",
    levels: NoiseLevels | None = None,
    empty_share: float = 0.1,
    start: Path | None = None,
) -> Iterator[StepRecord]:
    """Train, or resume training, in a directory. Yields a record after each step, and writes unet/ at the end.

    score: score each checkpoint by samples, and end with the weights of the best one instead of the last one.
    joint_heads: train these residual heads together with the noise predictor, and write them to heads/.
    prediction_type: "epsilon", "sample", "v_prediction" or "flow_prediction".
    levels: draw these noise levels instead of uniform times.
    empty_share: share of labels that are left out, if the shape has classes.
    start: begin with the weights of this network, run or bundle. It must have the same shape.
    """
    directory = Path(directory)
    _check_prediction(prediction_type, schedule)
    unet = shape.build(images.shape, config.seed)
    check_unet(unet)  # what could not be loaded again is not worth the training
    if start is not None:
        fill(unet, start)
    unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on CPUs, and no slower elsewhere
    network = HeadedNetwork(Backbone.of(unet), make_schedule(schedule), parameterisation=prediction_type)
    labels = Labels(shape.classes, empty_share) if shape.classes else None
    identity: dict[str, Any] = {
        "data": {"name": images.name, "images": len(images), "checksum": images.checksum},
        "network": shape.settings(),
        "schedule": schedule,
        "flip": flip,
        "score": None if score is None else asdict(score),
        **({"start": known_by(fingerprint(unet))} if start is not None else {}),
        **({"joint_heads": sorted(joint_heads)} if joint_heads else {}),
        **({"prediction_type": prediction_type} if prediction_type != "epsilon" else {}),
        **({"levels": asdict(levels)} if levels else {}),
        **({"empty_share": empty_share, "labels": known_by(label_checksum(images))} if labels else {}),
    }
    source = Conditioned.by_labels(images) if labels else images
    batches = Batches(source, network.schedule, config.batch_size, config.seed, flip, levels, labels)
    scorer = None if score is None else SampleScore(network, images, score, source)
    example = images.x_0(torch.arange(1))
    told = condition_of(source, torch.arange(1))
    tasks = (
        new_heads(network, example, joint_heads, "residual", seed=config.seed, condition=told) if joint_heads else {}
    )
    objective = JointObjective(network, tasks) if tasks else NoiseObjective(network)
    training = Training(objective, batches, config, directory, identity, scorer)
    yield from training.run()
    if training.accelerator.is_main_process:
        for name, task in tasks.items():
            save_head(directory / "heads" / f"{name}.safetensors", task.module, fingerprint(unet))
        save_unet(directory / "unet", unet)
