"""Any `DDPMPipeline` or `UNet2DModel` of diffusers: a directory, or a name on the hub.

diffusers counts times from 0, so the time argument of its networks is t - 1. Its loader fills keys that are
missing with random numbers and says so in a log; here they are an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optcov.checkpoints.files import CheckpointError, naming
from optcov.checkpoints.models import ImportedModel
from optcov.networks import TimeArgument
from optcov.prediction import PARAMETERISATIONS
from optcov.schedule import Schedule
from optcov.storage import read_json

PATTERNS = ("*.json", "*.safetensors", "*.bin")  # of a repository on the hub
SCHEDULERS = (
    "DDPMScheduler",
    "DDIMScheduler",
    "PNDMScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
)
CLASSES = ("UNet2DModel", "PaperUNet")


def is_diffusers(path: Path) -> bool:
    """Whether a directory holds a model or pipeline of diffusers."""
    return any((path / name).is_file() for name in ("model_index.json", "config.json"))


def import_diffusers(name: str | Path, image_size: int | None = None) -> ImportedModel:
    """Import a directory of diffusers, or download a name of the hub first.

    Without a scheduler beside the network, its schedule is taken to be diffusers' default: DDPM's linear one.
    """
    path = Path(name)
    with naming(path):
        if not path.is_dir():
            path = _download(str(name))
        unet = _load_unet(_folder(path, "unet", "config.json"))
        schedule, parameterisation = _read_schedule(path)
        channels = int(unet.config["in_channels"])
        size = image_size or unet.config["sample_size"]
        if not isinstance(size, int) or size < 1:
            raise CheckpointError(f"its sample_size is {size}, not the side of a square image; add --image-size")
        return ImportedModel(
            unet=unet,
            schedule=schedule,
            time_argument=_time_argument(unet),
            image_shape=(channels, size, size),
            source=str(name),
            learned_range=_has_learned_range(unet),
            parameterisation=parameterisation,
        )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"there is no such file or directory, and the hub gives none ({type(error).__name__})"
        ) from error


def _folder(path: Path, name: str, file: str) -> Path:
    """A component's folder; the oldest pipelines keep their components beside each other."""
    return path / name if (path / name / file).is_file() else path


def _load_unet(path: Path) -> Any:
    from diffusers import UNet2DModel

    from optcov.networks.paper_unet import PaperUNet

    config = read_json(path / "config.json")
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind not in CLASSES:
        raise CheckpointError(f"config.json describes {kind!r}, which is not an unconditional {CLASSES[0]}")
    if config.get("class_embed_type") is not None or config.get("num_class_embeds") is not None:
        raise CheckpointError("it is conditional on a class; only unconditional networks can be imported")
    loader = PaperUNet if kind == "PaperUNet" else UNet2DModel
    try:  # mismatches are let through here so that the report lists them all
        unet, report = loader.from_pretrained(
            path, output_loading_info=True, low_cpu_mem_usage=False, ignore_mismatched_sizes=True
        )
    # diffusers raises whatever its many layers raise on a damaged file
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise CheckpointError(f"diffusers cannot load it ({type(error).__name__}: {reason})") from error
    problems = [
        f"{len(report[what])} {what.replace('_', ' ')}: {', '.join(map(_describe, report[what]))}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if report[what]
    ]
    if problems:
        raise CheckpointError("; ".join(problems))
    return unet.eval()


def _describe(problem: Any) -> str:
    """A key, or a key with the shape found and the shape expected."""
    if isinstance(problem, tuple | list) and len(problem) == 3:
        return f"{problem[0]} has shape {tuple(problem[1])} instead of {tuple(problem[2])}"
    return str(problem)


def _read_schedule(path: Path) -> tuple[Schedule, str]:
    """Schedule and parameterisation, by the scheduler beside the network."""
    import diffusers

    folder = _folder(path, "scheduler", "scheduler_config.json")
    if not (folder / "scheduler_config.json").is_file():
        return Schedule.linear(), "epsilon"
    config = read_json(folder / "scheduler_config.json")
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind not in SCHEDULERS:
        raise CheckpointError(f"its scheduler is {kind!r}; known are {', '.join(SCHEDULERS)}")
    parameterisation = config.get("prediction_type", "epsilon")
    if parameterisation not in PARAMETERISATIONS:
        raise CheckpointError(f"its network predicts {parameterisation!r}; known are {', '.join(PARAMETERISATIONS)}")
    try:
        return Schedule.from_diffusers(getattr(diffusers, kind).from_config(config)), parameterisation
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CheckpointError(f"its scheduler_config.json gives no schedule: {error}") from error


def _time_argument(unet: Any) -> TimeArgument:
    return TimeArgument(float(unet.config.get("time_scale", 1.0)), float(unet.config.get("time_shift", 1.0)))


def _has_learned_range(unet: Any) -> bool:
    channels, out = unet.config["in_channels"], unet.config["out_channels"]
    if out not in (channels, 2 * channels):
        raise CheckpointError(
            f"it turns {channels} channels into {out}; a noise prediction has as many, or twice as many"
        )
    return bool(out == 2 * channels)
