"""The noise predictor that heads are fitted on, from wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from optcov.bundle import Bundle, load
from optcov.bundle.config import check_head_name
from optcov.bundle.directory import check_path
from optcov.bundle.loading import bundle_of
from optcov.bundle.weights import load_head, load_unet, read_json
from optcov.checkpoints import ImportedModel, import_model
from optcov.checkpoints.diffusers_models import is_bundle, is_diffusers
from optcov.checkpoints.opening import import_denoiser, import_network, import_pipeline, is_denoiser, load_pipeline
from optcov.fitting.config import TrainingError
from optcov.fitting.stage1 import make_schedule
from optcov.networks import Backbone, HeadedNetwork, TimeArgument
from optcov.networks.classes import LABELS
from optcov.schedule import Schedule

# files by which a directory tells its schedule
TELLING = ("run.json", "model_index.json", "scheduler_config.json", "scheduler/scheduler_config.json")


PLAIN = ("UNet2DModel", "PaperUNet")  # networks of images that tell all about themselves

# a directory, a bundle, a diffusers pipeline, (network, schedule or scheduler[, prediction type]), or a denoiser
Model = Any


def open_model(
    model: Model, schedule: str | Schedule | None = None, half: bool = False, empty_class: int | None = None
) -> Bundle:
    """Open what a user has as a bundle: see `open_predictor` for directories.

    A network in memory is shared, not copied, unless half rounds its weights. empty_class: the entry of its table of
    classes that stands for no class, which a foreign network does not tell.
    """
    found = _open(model, schedule, half)
    if empty_class is None:
        return found
    known = found.empty_condition.get(LABELS)
    if known is not None and int(known) != empty_class:
        raise TrainingError(f"empty_class = {empty_class}, but {found.name} has the empty class {int(known)} already")
    return found if known is not None else found.with_empty_class(empty_class)


def open_foreign(model: Model, layer: str | None = None, empty_class: int | None = None) -> ImportedModel | None:
    """Open what needs its data to become a bundle: models of latents or with captions, a user's own modules.

    None for all others, which `open_model` opens: bundles, runs, and U-Nets of images.
    """
    if isinstance(model, str | Path):
        pipeline = load_pipeline(check_path(model)) if Path(model).is_dir() and not is_bundle(Path(model)) else None
        found = None if pipeline is None else replace(import_pipeline(pipeline), source=Path(model).resolve().name)
    elif isinstance(model, Bundle):
        found = None
    elif hasattr(model, "components") and not isinstance(model, type):
        found = import_pipeline(model)
    elif isinstance(model, tuple) and len(model) in (2, 3) and callable(model[0]):
        found = import_network(model[0], model[1], model[2] if len(model) == 3 else None, layer)
    elif is_denoiser(model):
        found = import_denoiser(model, layer)
    else:
        shown = type(model).__name__ if callable(model) or isinstance(model, tuple) else repr(str(model)[:80])
        if isinstance(model, type):
            shown = f"the class {model.__name__}"
        raise TrainingError(
            f"model = {shown} is not a model that heads can be fitted on; give a directory, a bundle, a "
            f"diffusers pipeline, (network, schedule, prediction_type), or a denoiser D(x, sigma)"
        )
    images_only = found is not None and found.decoder is None and type(found.unet).__name__ in PLAIN
    if found is None or images_only:
        if layer is not None:
            raise TrainingError(f"layer = {layer!r}, but the model knows its output layer; leave layer out")
        return None
    if empty_class is not None:
        raise TrainingError("empty_class is for U-Nets with classes; give what stands for none as a condition")
    return found


def _open(model: Model, schedule: str | Schedule | None, half: bool) -> Bundle:
    if isinstance(model, str | Path):
        return open_predictor(check_path(model), schedule, half)
    if isinstance(model, Bundle):
        found = model
    elif hasattr(model, "components") and not isinstance(model, type):
        found = bundle_of(import_pipeline(model))
    else:
        found = bundle_of(import_network(*model))
    if schedule is not None:
        raise TrainingError("the model knows its schedule; leave schedule out")
    fresh = half and not isinstance(model, Bundle)
    return found.with_float16_weights() if fresh else found


def open_predictor(source: Path, schedule: str | Schedule | None = None, half: bool = False) -> Bundle:
    """Open a run of `optcov train`, a bundle, a diffusers pipeline or a unet alone, as a bundle.

    schedule: that of a unet alone, by default diffusers' linear one; a run, a bundle and a pipeline know theirs. half:
    round the weights of all but a bundle to float16, so that the new bundle stores them in half the space; heads must
    be fitted on the rounded weights.
    """
    source = Path(source)
    if not source.exists():
        raise TrainingError(
            f"no such file or directory: {source} (of the hub: optcov import NAME --out DIR, then fit DIR)"
        )
    if source.is_file():
        raise TrainingError(
            f"{source} is a file; turn it into a bundle by optcov import {source} --out DIR, then fit DIR"
        )
    if schedule is not None and (is_bundle(source) or any((source / name).is_file() for name in TELLING)):
        raise TrainingError(f"{source} knows its schedule; leave --schedule out")
    if (source / "run.json").is_file():
        return _from_run(source, half)
    if is_bundle(source):
        return load(source)
    if is_diffusers(source):
        return _imported(import_model(source), schedule, half)
    raise TrainingError(
        f"{source} is neither a run of optcov train, nor a bundle, nor a pipeline or unet of diffusers: it has no "
        f"run.json, config.json or model_index.json"
    )


def _imported(model: ImportedModel, schedule: str | Schedule | None, half: bool) -> Bundle:
    """schedule: of a unet that does not tell its own; at discrete times it counts from 0 as in diffusers."""
    if schedule is not None:
        times = schedule if isinstance(schedule, Schedule) else make_schedule(schedule)
        argument = model.time_argument if times.discrete else TimeArgument.default(times)
        model = replace(model, schedule=times, time_argument=argument)
    bundle = bundle_of(model)
    return bundle.with_float16_weights() if half else bundle


def _from_run(source: Path, half: bool) -> Bundle:
    run = read_json(source / "run.json")
    if not (source / "unet").is_dir():
        raise TrainingError(f"the training in {source} is not finished; run optcov train again to go on with it")
    if not isinstance(run, dict) or not isinstance(run.get("schedule"), str):
        raise TrainingError(f"{source / 'run.json'} does not name the schedule of the training")
    joint = run.get("joint_heads", [])
    if not isinstance(joint, list):
        raise TrainingError(f"{source / 'run.json'}: joint_heads is not a list of names but {str(joint)[:50]!r}")
    names = [check_head_name(name) for name in joint]
    # heads belong to the weights that they were trained with, so these are not rounded
    bundle = _as_bundle(load_unet(source / "unet"), run, source.name, half and not names)
    heads = {name: load_head(source / "heads" / f"{name}.safetensors", bundle.fingerprint) for name in names}
    return bundle.with_heads(heads, bundle.fingerprint)


def _as_bundle(unet: nn.Module, run: dict[str, Any], name: str, half: bool) -> Bundle:
    config: Any = unet.config
    size = config.sample_size
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(sides) != 2:
        raise TrainingError(f"{name}: the network's sample_size is {size}, which tells no height and width")
    network = HeadedNetwork(
        Backbone.of(unet), make_schedule(run["schedule"]), parameterisation=run.get("prediction_type", "epsilon")
    ).eval()
    bundle = Bundle(network, (config.in_channels, *sides), name=name, provenance={"stage1": run})
    if (classes := _classes_of(run, name)) != (0 if bundle.classes is None else bundle.classes - 1):
        raise TrainingError(
            f"{name}: run.json tells of {classes} classes, for which the network has {bundle.classes or 0} entries; it "
            f"needs one more than classes, or none"
        )
    if classes:
        bundle = bundle.with_empty_class(classes)  # as `optcov train` makes them
    return bundle.with_float16_weights() if half else bundle


def _classes_of(run: dict[str, Any], name: str) -> int:
    """Classes that a run was trained on; 0 for none."""
    network = run.get("network")
    classes = network.get("classes", 0) if isinstance(network, dict) else 0
    if type(classes) is not int or classes < 0:
        raise TrainingError(f"{name}: run.json tells of {str(classes)[:50]!r} classes, which is no number of them")
    return classes
