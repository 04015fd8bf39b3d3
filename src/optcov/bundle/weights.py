"""Weights of a bundle: the noise predictor in diffusers' format, and heads that know their backbone.

Weights that are float16 numbers are stored as such, all others as they are: storing changes nothing. Loading
checks the config and the shapes before it builds a network, so that a hostile file claims no memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optcov import storage
from optcov.bundle.conditions import check_classes, check_empty
from optcov.bundle.errors import BundleError
from optcov.networks import Head, build_head, head_config
from optcov.networks.calls import CALLS, example_of, image_channels
from optcov.networks.classes import LABELS
from optcov.networks.unet_config import (
    BUILDING_ERRORS,
    MAX_CHANNELS,
    MAX_LAYERS,
    PLAIN_FLOATS,
    brief,
    check_computes,
    check_settings,
    no_plain_floats,
    split_config,
)

NETWORKS = (*CALLS, "PaperUNet")  # classes that a bundle can hold
UNET_CONFIG, UNET_WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
MAX_JSON_BYTES = 2**24

_COMPUTES: set[str] = set()  # settings and shapes that were tried in this process and fit: a trial takes half a second


def read_json(path: Path) -> Any:
    """Read JSON of a reasonable size."""
    storage.require_small(path, MAX_JSON_BYTES, BundleError)
    return storage.read_json(path)


def save_unet(directory: Path, unet: nn.Module) -> None:
    """Write a UNet2DModel, or the package's variant of it, as diffusers does; one that could not be read is refused."""
    _save(directory, unet, check_unet(unet))


def check_unet(unet: nn.Module) -> dict[str, Any]:
    """Raise the error that loading this network would, and return its settings as plain JSON values."""
    if getattr(unet, "peft_config", None):
        raise BundleError("the network has an adapter (LoRA) that no config describes; fuse it first, by fuse_lora")
    return _class_and_settings(_config(unet), "the network's config")[1]


def _config(unet: nn.Module) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(unet.to_json_string())  # type: ignore[operator]
    return config | {"_class_name": type(unet).__name__}


def check_images(
    unet: nn.Module,
    image_shape: tuple[int, ...],
    learned_range: bool,
    classes: int | None = None,
    empty_condition: Mapping[str, Tensor] | None = None,
) -> None:
    """Refuse a network that does not turn images of this shape into noise, by its classes; it takes no memory."""
    channels, found = image_shape[0], image_channels(unet)
    outputs = channels * (2 if learned_range else 1)
    if found != (channels, outputs):
        raise BundleError(
            f"images of {channels} channels need a network with {channels} inputs and {outputs} outputs, but this one "
            f"has {found[0]} and {found[1]}"
        )
    config: Any = unet.config
    embedding = config.get("class_embed_type")
    if embedding is not None:
        raise BundleError(
            f"the network embeds classes by {str(embedding)[:50]!r}; a bundle holds networks with a "
            f"table of classes (num_class_embeds), or without classes"
        )
    empty = empty_condition or {}
    check_classes(classes, empty, unet)
    check_empty(empty, unet)
    told = {**({} if classes is None else {LABELS: torch.zeros(1, dtype=torch.int64)}), **example_of(unet), **empty}
    shapes = {name: [str(value.dtype), *value.shape] for name, value in told.items()}
    known = json.dumps([_config(unet), list(image_shape), shapes], sort_keys=True)
    if known in _COMPUTES:
        return
    try:
        check_computes(without_memory(unet), image_shape, told)
    except ValueError as error:
        raise BundleError(f"the network does not fit: {error}") from error
    _COMPUTES.add(known)


def without_memory(unet: nn.Module) -> nn.Module:
    """A network of the same settings whose weights have shapes but no numbers; itself, if it is one."""
    if all(weight.is_meta for weight in unet.parameters()):
        return unet
    unet_class, settings = _class_and_settings(_config(unet), "the network's config")
    with torch.device("meta"):
        twin: nn.Module = unet_class(**settings)
    return twin.eval()


def load_unet(directory: Path, check: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """Read a UNet2DModel, or the package's variant of it, in eval mode, as float32.

    check: looks at the network before its weights take memory, and raises if it is not the one wanted.
    """
    unet = _load(directory, network_classes(), check)
    unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a quarter faster on CPUs
    return unet


def network_classes() -> dict[str, Any]:
    """The networks that a bundle can hold, by name."""
    import diffusers

    from optcov.networks.paper_unet import PaperUNet

    return {name: PaperUNet if name == "PaperUNet" else getattr(diffusers, name) for name in NETWORKS}


def can_store(network: nn.Module) -> bool:
    """Whether a bundle can hold a network: one of the known classes, not a user's own module."""
    kind = type(network)
    return kind.__name__ in NETWORKS and kind.__module__.startswith(("diffusers.", "optcov."))


def half_precision(network: nn.Module) -> str | None:
    """The name of the half precision that a network's weights are in; None if they are not."""
    weight = next(network.parameters(), None)
    names = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return None if weight is None else names.get(weight.dtype)


def decoder_classes() -> dict[str, Any]:
    """The autoencoders that a bundle can hold, by name."""
    import diffusers

    return {"AutoencoderKL": diffusers.AutoencoderKL, "VQModel": diffusers.VQModel}


def save_decoder(directory: Path, decoder: nn.Module) -> None:
    """Write an autoencoder as diffusers does."""
    _save(directory, decoder, _class_and_settings(_config(decoder), "the decoder's config", decoder_classes())[1])


def _save(directory: Path, module: nn.Module, settings: Mapping[str, Any]) -> None:
    names = {name: value for name, value in _config(module).items() if name.startswith("_")}
    storage.write_json(directory / UNET_CONFIG, {**names, **settings})
    storage.write_tensors(directory / UNET_WEIGHTS, _packed(module.state_dict()), {"format": "pt"})


def load_decoder(directory: Path) -> nn.Module:
    """Read an autoencoder, in eval mode, as float32."""
    return _load(directory, decoder_classes())


def _load(directory: Path, classes: Mapping[str, Any], check: Callable[[nn.Module], None] | None = None) -> nn.Module:
    path = directory / UNET_CONFIG
    content = read_json(path)
    if not isinstance(content, dict):
        raise BundleError(f"{path} does not hold an object")
    kind, options = _class_and_settings(content, str(path), classes)
    tensors, _ = storage.read_tensors(directory / UNET_WEIGHTS)
    return _build_and_fill(lambda: kind(**options), tensors, path, directory / UNET_WEIGHTS, check)


def _class_and_settings(
    config: Mapping[str, Any], where: str, classes: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The class that a config names, and its settings, checked."""
    classes = classes or network_classes()
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in classes:
        raise BundleError(f"{where}: a bundle holds a {' or '.join(classes)}, not {str(name)[:80]!r}")
    try:
        settings, _ = split_config(classes[name], config)
        check_settings(classes[name], settings)
    except ValueError as error:
        raise BundleError(f"{where}: {error}") from error
    return classes[name], settings


def save_head(path: Path, head: Head, fitted_on: str) -> None:
    """Write a head with its config and the fingerprint of the backbone that it was fitted on."""
    metadata = {"config": json.dumps(head_config(head)), "backbone": fitted_on}
    storage.write_tensors(path, _packed(head.state_dict()), metadata)


def load_head(path: Path, fingerprint: str) -> Head:
    """Read a head, in eval mode; one that was fitted on another backbone is refused."""
    tensors, metadata = storage.read_tensors(path)
    check_backbone(str(path), metadata.get("backbone", "none"), fingerprint)
    try:
        config = storage.parse_json(metadata.get("config", "null"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: the head's config is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise BundleError(f"{path} does not say what kind of head it holds")
    for name, value in config.items():
        values = value if isinstance(value, list) else [value]
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(values) > MAX_LAYERS or not all(abs(number) <= MAX_CHANNELS for number in numbers):
            raise BundleError(f"{path}: {name[:50]} = {str(value)[:80]} is larger than any head here")
    head = _build_and_fill(lambda: build_head(config), tensors, path, path)
    assert isinstance(head, Head)
    return head


def check_backbone(what: str, fitted_on: str, fingerprint: str) -> None:
    """Raise a ValueError if a head belongs to another backbone."""
    if fitted_on != fingerprint:
        raise BundleError(
            f"{what}: the head was fitted on another backbone, whose weights are not those of this one; a head reads "
            f"its own backbone's features: fit it again (optcov fit)"
        )


def _build_and_fill(
    build: Callable[[], nn.Module],
    tensors: Mapping[str, Tensor],
    config: Path,
    weights: Path,
    check: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Build without memory, compare every shape and type with the file, and only then take the file's weights."""
    try:
        with torch.device("meta"):
            empty = build().eval()
    except BUILDING_ERRORS as error:
        raise BundleError(f"{config} describes no network that can be built: {brief(error)}") from error
    described = empty.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in described.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(set(expected) | set(found)):
        if expected.get(name) != found.get(name):
            raise BundleError(
                f"{weights}: {name[:80]!r} has the shape {found.get(name, 'none (it is missing)')}, "
                f"but {config} calls for {expected.get(name, 'no such weight')}"
            )
    for name, tensor in tensors.items():
        if tensor.dtype not in PLAIN_FLOATS:
            raise BundleError(f"{weights}: {name[:80]!r} {no_plain_floats(tensor)}")
    if check is not None:
        check(empty)
    # copies: a file's bytes lie in memory as they come, where products of matrices may round otherwise
    known = {
        name: _unpacked(tensor, name, weights).to(described[name].dtype, copy=True) for name, tensor in tensors.items()
    }
    module = empty
    module.load_state_dict(known, assign=True)
    if _lacks_memory(module):  # what no file holds, such as a table of positions
        with torch.random.fork_rng(devices=[]):  # the initial weights are thrown away; the caller's noise is not
            module = build()
        module.load_state_dict(known)
    return module.eval().requires_grad_(False)


def _lacks_memory(module: nn.Module) -> bool:
    """Whether a tensor of the module has a shape but no numbers."""
    held = (value for part in module.modules() for value in (*vars(part).values(), *part._buffers.values()))
    return any(isinstance(value, Tensor) and value.is_meta for value in held)


def _packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store as float16 what float16 holds without a change."""
    exact = {n for n, w in weights.items() if w.dtype == torch.float32 and torch.equal(w.half().float(), w)}
    return {name: w.half() if name in exact else w for name, w in weights.items()}


def _unpacked(weight: Tensor, name: str, path: Path) -> Tensor:
    if not bool(weight.float().isfinite().all()):
        raise BundleError(f"{path}: the weight {name[:80]!r} holds NaN or infinity")
    return weight.float() if weight.dtype.itemsize < 4 else weight
