"""A model in memory, of any kind that is taken: a pipeline, a network with its schedule, a denoiser D(x, sigma)."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from optcov.checkpoints.diffusers_models import imported_unet, not_loaded, quietly, read_config, require_finite
from optcov.checkpoints.errors import CheckpointError, naming
from optcov.checkpoints.families import FAMILIES, MODELS, Condition, Family, family_of
from optcov.checkpoints.models import ImportedModel
from optcov.checkpoints.schedules import schedule_of
from optcov.networks import TimeArgument
from optcov.networks.calls import image_channels
from optcov.networks.classes import LABELS, class_entries
from optcov.prediction import check_kind
from optcov.schedule import Schedule

DECODERS = ("AutoencoderKL", "VQModel")
CAPTIONS_AT_ONCE = 16
EDM_SIGMAS = (0.002, 80.0)  # of the authors' sampler; their networks take any


@final
@dataclass(frozen=True)
class Words:
    """Captions as a network takes them, by the text encoders of its pipeline."""

    pipeline: Any
    family: Family

    def encode(self, captions: Sequence[str], size: tuple[int, int]) -> Condition:
        """The condition of captions for images of this height and width, each (n, ...), on the CPU."""
        parts = []
        for first in range(0, len(captions), CAPTIONS_AT_ONCE):
            some = list(captions[first : first + CAPTIONS_AT_ONCE])
            parts.append(self._encoded(some, size, empty=False))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def empty(self, size: tuple[int, int]) -> Condition:
        """What stands for no caption, each (1, ...); nothing for models that were not trained for guidance."""
        return self._encoded([""], size, empty=True) if self.family.guided else {}

    def _encoded(self, captions: Sequence[str], size: tuple[int, int], empty: bool) -> Condition:
        assert self.family.encode is not None
        with torch.no_grad(), quietly():
            found = self.family.encode(self.pipeline, captions, size, empty)
        return {name: value.cpu() for name, value in found.items()}

    @property
    def missing(self) -> str | None:
        """An encoder or a tokenizer that the pipeline needs for captions and does not have."""
        return next((name for name in self.family.encoders if getattr(self.pipeline, name, None) is None), None)

    def require_encoders(self) -> None:
        """Refuse to encode captions without what encodes them."""
        if self.missing is not None:
            raise CheckpointError(
                f"this {type(self.pipeline).__name__} has no {self.missing}, so that it cannot encode captions; load "
                f"the whole pipeline, or give latents with encoded captions as condition="
            )


def import_pipeline(pipeline: Any) -> ImportedModel:
    """Take a pipeline of diffusers as it is in memory; its networks are shared, not copied."""
    name = type(pipeline).__name__
    parts = {part: value for part, value in pipeline.components.items() if value is not None}
    family = family_of(name, parts)
    network, scheduler = parts[family.network], parts["scheduler"]
    network = getattr(network, "_orig_mod", network)  # of a network that torch.compile made
    if type(network).__name__ not in (family.model, "PaperUNet"):
        kind = type(network).__name__
        remedy = "; give the pipeline as it was before optcov.attach" if kind.endswith("WithHead") else ""
        raise CheckpointError(f"{name}: its {family.network} is a {kind}, not a {family.model}{remedy}")
    schedule, kind = schedule_of(scheduler)
    if family.decoder is None:
        return imported_unet(network, schedule, kind, name)
    decoder = parts[family.decoder]
    if type(decoder).__name__ not in DECODERS:
        raise CheckpointError(
            f"{name}: its {family.decoder} is a {type(decoder).__name__}, not {' or '.join(DECODERS)}"
        )
    channels = int(decoder.config["latent_channels"])
    taken, outputs = image_channels(network)
    if taken != channels:
        raise CheckpointError(
            f"{name}: its {family.network} takes {taken} channels, but its {family.decoder} makes {channels}; models "
            f"that are told an image besides (inpainting) are not taken"
        )
    side = network.config.get("sample_size")
    sides = None if side is None else (side, side) if isinstance(side, int) else tuple(side)
    return ImportedModel(
        unet=network.eval(),
        schedule=schedule,
        time_argument=_time_argument(schedule, family.time_scale),
        image_shape=None if sides is None else (channels, *sides),
        source=name,
        learned_range=outputs == 2 * channels,
        parameterisation=kind,
        data_range=None,
        decoder=decoder.eval(),
        words=None if family.encode is None else Words(pipeline, family),
        empty_condition=_empty_class(network) if family.labels else {},
        any_size=family.any_size,
    )


def load_pipeline(path: Path) -> Any | None:
    """The pipeline of a directory, if it is one whose images are latents; None if it is another kind of model.

    Its class must be one of those that are known. Weights stay in the precision of their files.
    """
    index = path / "model_index.json"
    if not index.is_file():
        return None
    with naming(path):
        content = read_config(index)
        kind = content.get("_class_name") if isinstance(content, dict) else None
        if not isinstance(kind, str) or (kind in FAMILIES and FAMILIES[kind].decoder is None):
            return None
        parts = {name: part for name, part in content.items() if isinstance(part, list) and all(part)}
        family = family_of(kind, parts)
        import diffusers

        try:
            with quietly(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer releases call the precision by another name
                pipeline = getattr(diffusers, kind).from_pretrained(
                    path, local_files_only=True, torch_dtype=_precision(path / family.network)
                )
        # diffusers and transformers raise whatever their many layers raise on a damaged file
        except Exception as error:
            raise not_loaded(error) from error
        for part in (family.network, family.decoder):
            require_finite(getattr(pipeline, part or ""), f"{part}: ")
        return pipeline


def import_network(
    network: Any, schedule: Any, kind: str | None = None, layer: str | None = None, source: str | None = None
) -> ImportedModel:
    """A network with its schedule, or with a scheduler of diffusers that tells it.

    kind: what it predicts; by default what the scheduler says, or noise. layer: the output layer of a module of your
    own. Networks of diffusers, and others with a scheduler of diffusers, are told times as diffusers tells them; others
    with a schedule are told its own.
    """
    name: str = source or getattr(network, "__name__", None) or type(network).__name__
    by_diffusers = not isinstance(schedule, Schedule)
    if not isinstance(schedule, Schedule):
        schedule, found = schedule_of(schedule)
        kind = kind or found
    kind = check_kind(kind or "epsilon")
    if type(network).__name__ in ("UNet2DModel", "PaperUNet"):
        return imported_unet(network, schedule, kind, name)
    known = type(network).__name__ in MODELS
    if not known and not callable(network):
        raise CheckpointError(f"{name} cannot be called as network(x, time); give a torch module or a function")
    if known:
        side = network.config.get("sample_size")
        scale = 1.0 if type(network).__name__ == "FluxTransformer2DModel" else None
        argument = _time_argument(schedule, scale)
        channels, outputs = image_channels(network)
        shape = (channels, side, side) if isinstance(side, int) else None
        learned = outputs == 2 * channels
    else:
        argument = _time_argument(schedule, None) if by_diffusers else TimeArgument(1.0)
        shape, learned = None, False
    return ImportedModel(
        unet=network.eval() if isinstance(network, nn.Module) else Function(network),
        schedule=schedule,
        time_argument=argument,
        image_shape=shape,
        source=name,
        learned_range=learned,
        parameterisation=kind,
        layer=layer,
        any_size=True,
        empty_condition=_empty_class(network) if known else {},
    )


def is_denoiser(model: Any) -> bool:
    """Whether something is called as D(x, sigma): it knows its sigmas, or its second argument has that name."""
    if not callable(model) or isinstance(model, type) or type(model).__name__ in MODELS:
        return False
    if hasattr(model, "sigma_data") or all(hasattr(model, name) for name in ("sigma_min", "sigma_max")):
        return True
    try:
        taken = list(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters)
    except (TypeError, ValueError):  # what is written in C need not tell its arguments
        return False
    return taken[1:2] == ["sigma"]


def import_denoiser(denoiser: Any, layer: str | None = None) -> ImportedModel:
    """An EDM or k-diffusion denoiser D(x, sigma), which returns the clean image."""
    low, high = (
        float(getattr(denoiser, name, end) or end)
        for name, end in zip(("sigma_min", "sigma_max"), EDM_SIGMAS, strict=True)
    )
    low, high = (EDM_SIGMAS[0] if low <= 0 else low), (EDM_SIGMAS[1] if not math.isfinite(high) else high)
    return import_network(denoiser, Schedule.edm(low, high), "sample", layer)


@final
class Function(nn.Module):
    """A plain function as a module without weights; heads have nothing to read in it."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, time: Tensor, **condition: Tensor) -> Any:
        """Call it."""
        return self.function(x, time, **condition)


def _time_argument(schedule: Schedule, scale: float | None) -> TimeArgument:
    """As diffusers tells a time: discrete ones count from 0, real ones go to 1,000 unless a network wants another."""
    if schedule.discrete:
        return TimeArgument(1.0, 1.0)
    return TimeArgument(schedule.argument_scale if scale is None else scale)


def _empty_class(network: Any) -> dict[str, Tensor]:
    """The last class of a DiT stands for none, as its authors trained it."""
    entries = class_entries(network) if type(network).__name__ == "DiTTransformer2DModel" else None
    return {} if entries is None else {LABELS: torch.tensor([entries - 1])}


def _precision(folder: Path) -> torch.dtype:
    """The type of the weights in a folder's files; float32 where they do not tell."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                found: torch.dtype = tensors.get_tensor(name).dtype
                return found
    return torch.float32
