"""Weights of a bundle: the noise predictor in diffusers' format, and heads that know their backbone.

Weights that are float16 numbers are stored as such, all others as they are: storing changes nothing. Loading
checks the config and the shapes before it builds a network, so that a hostile file claims no memory.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optcov import storage
from optcov.bundle.errors import BundleError
from optcov.networks import Head, build_head, head_config

UNET_CONFIG, UNET_WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
MAX_JSON_BYTES = 2**24
MAX_LAYERS = 64  # per block, and blocks per network
MAX_CHANNELS = 2**14


def read_json(path: Path) -> Any:
    """Read JSON of a reasonable size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    if size > MAX_JSON_BYTES:
        raise BundleError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
    return storage.read_json(path)


def save_unet(directory: Path, unet: nn.Module) -> None:
    """Write a UNet2DModel, or the package's variant of it, as diffusers does."""
    _unet_classes(type(unet).__name__)
    storage.write_json(directory / UNET_CONFIG, json.loads(unet.to_json_string()))  # type: ignore[operator]
    storage.write_tensors(directory / UNET_WEIGHTS, _packed(unet.state_dict()), {"format": "pt"})


def load_unet(directory: Path) -> nn.Module:
    """Read a UNet2DModel, or the package's variant of it, in eval mode, as float32."""
    path = directory / UNET_CONFIG
    content = read_json(path)
    if not isinstance(content, dict):
        raise BundleError(f"{path} does not hold an object")
    unet_class = _unet_classes(content.get("_class_name"), path)
    options = {name: value for name, value in content.items() if not name.startswith("_")}
    _check_options(path, unet_class, options)
    tensors, _ = storage.read_tensors(directory / UNET_WEIGHTS)

    def build() -> nn.Module:
        module: nn.Module = unet_class(**options)
        return module

    unet = _build_and_fill(build, tensors, path, directory / UNET_WEIGHTS)
    unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a quarter faster on CPUs
    return unet


def _unet_classes(name: Any, path: Path | None = None) -> Any:
    from diffusers import UNet2DModel

    from optcov.networks.paper_unet import PaperUNet

    classes = {"UNet2DModel": UNet2DModel, "PaperUNet": PaperUNet}
    if not isinstance(name, str) or name not in classes:
        where = f"{path}: " if path else ""
        raise BundleError(f"{where}a bundle holds a {' or '.join(classes)}, not {str(name)[:80]!r}")
    return classes[name]


def _check_options(path: Path, unet_class: Any, options: Mapping[str, Any]) -> None:
    """Refuse settings that the class does not know, and sizes beyond any network of this kind."""
    unknown = sorted(set(options) - set(inspect.signature(unet_class.__init__).parameters))
    if unknown:
        raise BundleError(f"{path} has settings that {unet_class.__name__} does not know: {unknown[:5]}")
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        largest = MAX_LAYERS if name == "layers_per_block" else MAX_CHANNELS
        if len(values) > MAX_LAYERS or not all(abs(number) <= largest for number in numbers):
            raise BundleError(f"{path}: {name} = {str(value)[:80]} is larger than any network here")


def save_head(path: Path, head: Head, backbone: str) -> None:
    """Write a head with its config and the fingerprint of the backbone that it was fitted on."""
    metadata = {"config": json.dumps(head_config(head)), "backbone": backbone}
    storage.write_tensors(path, _packed(head.state_dict()), metadata)


def load_head(path: Path, backbone: str) -> Head:
    """Read a head, in eval mode; one that was fitted on another backbone is refused."""
    tensors, metadata = storage.read_tensors(path)
    check_backbone(str(path), metadata.get("backbone", "none"), backbone)
    try:
        config = json.loads(metadata.get("config", "null"))
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


def check_backbone(what: str, fitted_on: str, backbone: str) -> None:
    """Raise a ValueError if a head belongs to another backbone."""
    if fitted_on != backbone:
        raise BundleError(
            f"{what}: the head was fitted on another backbone, whose weights are not those of this one; a head reads "
            f"its own backbone's features: fit it again (optcov fit)"
        )


def _build_and_fill(build: Any, tensors: Mapping[str, Tensor], config: Path, weights: Path) -> nn.Module:
    """Build without memory, compare every shape with the file, and only then build for real."""
    try:
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in build().state_dict().items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError, RuntimeError,
            ZeroDivisionError, AssertionError) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BundleError(f"{config} describes no network that can be built: {reason}") from error
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(set(expected) | set(found)):
        if expected.get(name) != found.get(name):
            raise BundleError(
                f"{weights}: {name[:80]!r} has the shape {found.get(name, 'none (it is missing)')}, "
                f"but {config} calls for {expected.get(name, 'no such weight')}"
            )
    with torch.random.fork_rng(devices=[]):  # the initial weights are thrown away; the caller's noise is not
        module = build()
    module.load_state_dict({name: _unpacked(tensor, name, weights) for name, tensor in tensors.items()})
    return module.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store as float16 what float16 holds without a change."""
    return {name: (w.half() if _is_half(w) else w) for name, w in weights.items()}


def _is_half(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and torch.equal(weight.half().float(), weight)


def _unpacked(weight: Tensor, name: str, path: Path) -> Tensor:
    if weight.is_floating_point():
        if not bool(weight.isfinite().all()):
            raise BundleError(f"{path}: the weight {name[:80]!r} holds NaN or infinity")
        return weight.float() if weight.dtype.itemsize < 4 else weight
    return weight
