"""Whatever a user names: a file of the paper's networks, or a `DDPMPipeline` or `UNet2DModel` of diffusers.

The latter is a directory, or a name on the hub.

diffusers counts times from 0, so the time argument of its networks is t - 1. Its loader fills keys that are
missing with random numbers and says so in a log; here they are an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.checkpoints.architecture import has_learned_range
from optcov.checkpoints.errors import CheckpointError, naming
from optcov.checkpoints.files import check_size, read_file
from optcov.checkpoints.models import ImportedModel, import_checkpoint
from optcov.checkpoints.schedules import schedule_of_config
from optcov.networks import TimeArgument
from optcov.networks.unet_config import (
    BUILDING_ERRORS,
    PLAIN_FLOATS,
    brief,
    check_settings,
    no_plain_floats,
    split_config,
)
from optcov.prediction import check_kind
from optcov.schedule import Schedule
from optcov.storage import read_json

PATTERNS = ("*.json", "*.safetensors", "*.bin")  # of a repository on the hub
CLASSES = ("UNet2DModel", "PaperUNet")
LATENT_PARTS = ("vae", "vqvae", "movq")  # parts of a pipeline that turn latents into images
SUPPORTED = "give a pipeline of an unconditional UNet2DModel, such as DDPMPipeline or DDIMPipeline"
WEIGHTS = "diffusion_pytorch_model"  # and an ending; large ones come in several files
MAX_JSON_BYTES = 2**24
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")


def import_model(
    source: str | Path, name: str | None = None, *, image_size: int | None = None, **options: Any
) -> ImportedModel:
    """Import whatever the source is; the options are those of `import_checkpoint`.

    All but image_size belong to the paper's networks and are refused for a model of diffusers.
    """
    path = Path(source)
    with naming(path):
        on_hub = not path.exists() and path.suffix not in _FILES and _HUB_NAME.fullmatch(str(source)) is not None
        if not on_hub and not (path.is_dir() and is_diffusers(path)):
            return import_checkpoint(path, name, image_size=image_size, **options)
        given = [option for option, value in {"as": name, **options}.items() if value is not None]
        if given:
            raise CheckpointError(f"it is a model of diffusers, which says all that itself; leave out --{given[0]}")
        return import_diffusers(source, image_size)


def is_diffusers(path: Path) -> bool:
    """Whether a directory holds a model or pipeline of diffusers; of the latter, network and scheduler will do."""
    parts = ("unet/config.json", "scheduler/scheduler_config.json")
    named = any((path / name).is_file() for name in ("model_index.json", "config.json"))
    return named or all((path / name).is_file() for name in parts)


def is_bundle(path: Path) -> bool:
    """Whether a directory holds a bundle, which this layer knows by its config alone."""
    if not (path / "config.json").is_file():
        return False
    config = read_config(path / "config.json")
    return isinstance(config, dict) and config.get("format") == "optcov-bundle"


def import_diffusers(name: str | Path, image_size: int | None = None) -> ImportedModel:
    """Import a directory of diffusers, or download a name of the hub first.

    Without a scheduler beside the network, its schedule is taken to be diffusers' default: DDPM's linear one.
    """
    path = Path(name)
    with naming(path):
        if not path.is_dir():
            path = _download(str(name))
        if is_bundle(path):  # which keeps the schedule of its network in its own way
            raise CheckpointError("it is a bundle already; use it as it is")
        _refuse_part(path)
        index = path / "model_index.json"
        _refuse_other_pipelines(path, read_config(index) if index.is_file() else {})
        unet, left_out = _load_unet(_folder(path, "unet", "config.json"))
        model = imported_unet(unet, *_read_schedule(path), str(name), image_size)
        return replace(model, left_out=left_out)


def _refuse_other_pipelines(path: Path, index: Any) -> None:
    """Refuse pipelines without a U-Net, and those of latents, whose network has the shape of any other.

    index: the content of model_index.json, or nothing.
    """
    if not isinstance(index, dict):
        raise CheckpointError("model_index.json is not the index of a pipeline")
    kind = f"it is of the class {str(index['_class_name'])[:80]}, which" if "_class_name" in index else "it"
    # a part is a library and a class; [null, null] is one that was left out, and anything else is a setting
    parts = {name for name, part in index.items() if isinstance(part, list) and len(part) == 2 and all(part)}
    parts |= {name for name in ("unet", *LATENT_PARTS) if (path / name / "config.json").is_file()}
    if "unet" not in parts and not (path / "config.json").is_file():
        others = ", ".join(sorted(parts))[:200]
        raise CheckpointError(f"{kind} has no unet{f' but {others}' if others else ''}; {SUPPORTED}")
    decoder = next((name for name in LATENT_PARTS if name in parts), None)
    if decoder is not None:
        raise CheckpointError(
            f"{kind} draws latents that its {decoder} decodes, and the commands know images only; from Python a "
            f"network of latents works with data_range=None (docs/faq.md), or {SUPPORTED}"
        )


def imported_unet(
    unet: Any, schedule: Schedule, parameterisation: str, source: str, image_size: int | None = None
) -> ImportedModel:
    """A UNet2DModel with the schedule it was trained on; discrete times count from 0 as in diffusers."""
    kind = type(unet).__name__
    if kind not in CLASSES:
        raise CheckpointError(f"{source}: its network is a {kind}, not a {CLASSES[0]}")
    _refuse_embeddings(unet.config, f"{source}: ")
    height, width = _sides(image_size or unet.config["sample_size"])
    return ImportedModel(
        unet=unet,
        schedule=schedule,
        time_argument=_time_argument(unet.config, schedule),
        image_shape=(int(unet.config["in_channels"]), height, width),
        source=source,
        learned_range=has_learned_range(unet.config["in_channels"], unet.config["out_channels"]),
        parameterisation=check_kind(parameterisation),
    )


def _time_argument(config: Any, schedule: Schedule) -> TimeArgument:
    """What the config says, which of a UNet2DModel is t - 1; real times do not count from 0."""
    told = TimeArgument(config.get("time_scale", 1.0), config.get("time_shift", 1.0))
    return told if schedule.discrete or told != TimeArgument(1.0, 1.0) else TimeArgument.default(schedule)


def _refuse_embeddings(config: Any, where: str = "") -> None:
    found = config.get("class_embed_type")
    if found is not None:
        raise CheckpointError(
            f"{where}it embeds classes by {str(found)[:50]!r}; only networks with a table of classes "
            f"(num_class_embeds) or without classes can be imported"
        )


def _refuse_part(path: Path) -> None:
    """The network of a pipeline alone would lose the schedule and the prediction type that lie beside it."""
    if any((path / name).is_file() for name in ("model_index.json", "scheduler_config.json")):
        return
    for whole in dict.fromkeys((path.absolute().parent, path.resolve().parent)):
        kind = _kind_of_whole(whole)
        if kind:
            raise CheckpointError(f"it is a part of the {kind} {whole}; give that, which knows the schedule")


def _kind_of_whole(path: Path) -> str | None:
    if any((path / name).is_file() for name in ("model_index.json", "scheduler/scheduler_config.json")):
        return "pipeline"
    if (path / "run.json").is_file() and (path / "unet").is_dir():
        return "run"
    try:
        return "bundle" if is_bundle(path) else None
    except (ValueError, OSError):  # a file of something else that happens to have the name
        return None


def read_config(path: Path) -> Any:
    """Read a JSON file of somebody else, of a reasonable size."""
    if path.is_file() and path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path.name} has {path.stat().st_size:,} bytes, which no config needs")
    return read_json(path)


def _sides(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise CheckpointError(
            f"its sample_size is {str(size)[:80]}, not height and width; add --image-size to optcov import, or set it "
            f"by unet.register_to_config(sample_size=...)"
        )
    return sides[0], sides[1]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"there is no such file, and the hub gives none ({type(error).__name__})") from error


def _folder(path: Path, name: str, file: str) -> Path:
    """A component's folder; the oldest pipelines keep their components beside each other."""
    return path / name if (path / name / file).is_file() else path


def _load_unet(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The network, and the names in its config that are off and that nobody here knows."""
    from diffusers import UNet2DModel

    from optcov.networks.paper_unet import PaperUNet

    config = read_config(path / "config.json")
    kind = config.get("_class_name") if isinstance(config, dict) else None
    if kind not in CLASSES:
        raise CheckpointError(f"config.json describes {kind!r}, which is not a {CLASSES[0]}")
    _refuse_embeddings(config)
    loader = PaperUNet if kind == "PaperUNet" else UNet2DModel
    left_out = _check_config(path, config, loader)
    try:  # mismatches are let through here so that the report lists them all
        with quietly():
            unet, report = loader.from_pretrained(
                path, output_loading_info=True, low_cpu_mem_usage=False, ignore_mismatched_sizes=True
            )
    # diffusers raises whatever its many layers raise on a damaged file
    except Exception as error:
        raise not_loaded(error) from error
    problems = [
        f"{len(report[what])} {what.replace('_', ' ')}: {', '.join(map(_describe, report[what]))}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if report[what]
    ]
    if problems:
        raise CheckpointError("; ".join(problems))
    require_finite(unet)
    return unet.float().eval(), left_out


def not_loaded(error: Exception) -> CheckpointError:
    """What to raise where diffusers fails, by what it says."""
    return CheckpointError(f"diffusers cannot load it ({type(error).__name__}: {' '.join(str(error).split())[:500]})")


def require_finite(module: Any, where: str = "") -> None:
    """Refuse weights that are no numbers."""
    for key, weights in module.state_dict().items():
        if not bool(weights.isfinite().all()):
            raise CheckpointError(f"{where}{key} holds NaN or infinite numbers; the file is damaged")


@contextmanager
def quietly() -> Iterator[None]:
    """Keep diffusers from telling in its log what the report tells, and it and transformers from bars of their own."""
    from diffusers.utils import is_transformers_available, logging

    bars: list[Any] = [logging]
    if is_transformers_available():
        bars.append(import_module("transformers.utils.logging"))
    before, shown = logging.get_verbosity(), [each for each in bars if each.is_progress_bar_enabled()]
    logging.set_verbosity_error()
    for each in shown:
        each.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        for each in shown:
            each.enable_progress_bar()


def _check_config(path: Path, config: dict[str, Any], loader: Any) -> tuple[str, ...]:
    """Refuse settings by the rules that a bundle is loaded by, and weights that are not those of the config.

    Returns the names in the config that are off and that the class does not know.
    """
    try:
        settings, left_out = split_config(loader, config)
        check_settings(loader, settings)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error
    try:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in loader(**settings).parameters())
    except BUILDING_ERRORS as error:
        raise CheckpointError(f"config.json describes no network ({type(error).__name__}: {brief(error)})") from error
    _check_weights(path, weights)
    return tuple(left_out)


def _check_weights(path: Path, weights: int) -> None:
    """Refuse files with fewer bytes than the config has weights, or of types whose numbers diffusers would change."""
    files = sorted(path.glob(f"{WEIGHTS}*.safetensors")) or sorted(path.glob(f"{WEIGHTS}*.bin"))
    for file in files:
        content = read_file(file)
        tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
        check_size(tensors.values(), file.stat().st_size)
        for name, tensor in tensors.items():
            if tensor.dtype not in PLAIN_FLOATS:
                raise CheckpointError(f"{name[:80]} {no_plain_floats(tensor)}")
    size = sum(file.stat().st_size for file in files)
    if weights > size:
        raise CheckpointError(f"config.json describes {weights:,} weights, but the files of them have {size:,} bytes")


def _describe(problem: Any) -> str:
    """A key, or a key with the shape found and the shape expected."""
    if isinstance(problem, tuple | list) and len(problem) == 3:
        return f"{problem[0]} has shape {tuple(problem[1])} instead of {tuple(problem[2])}"
    return str(problem)


def _read_schedule(path: Path) -> tuple[Schedule, str]:
    """Schedule and parameterisation, by the scheduler beside the network."""
    folder = _folder(path, "scheduler", "scheduler_config.json")
    if not (folder / "scheduler_config.json").is_file():
        return Schedule.linear(), "epsilon"
    with quietly():
        return schedule_of_config(read_config(folder / "scheduler_config.json"))
