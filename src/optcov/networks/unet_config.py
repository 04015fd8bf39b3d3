"""What the config of a U-Net may say: one rule for everything that reads or writes one.

A config is somebody else's file. It is checked before anything is built from it: names that the class knows, values of
the right type, sizes of a network that somebody could have.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from optcov.networks.calls import call

MAX_LAYERS = 64  # per block, and blocks per network
MAX_CHANNELS = 2**14
MAX_CLASSES = 2**20
LARGEST = {
    "layers_per_block": MAX_LAYERS,
    "num_layers": MAX_LAYERS,
    "num_class_embeds": MAX_CLASSES,
}  # else MAX_CHANNELS
PLAIN_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # what weights are stored as
BUILDING_ERRORS = (  # by what diffusers' constructors and forward passes fail on settings that do not fit each other
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError, RuntimeError),
    *(ZeroDivisionError, AssertionError, OverflowError, NameError),
)


def split_config(unet_class: Any, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings of a config, without what begins with an underscore, and the names that were left out.

    A name that the class does not know is left out if it is off (null or false): newer code adds such settings, and
    they change nothing. With any other value it may change what the network computes, so that it is an error.
    """
    known = _known(unet_class)
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    unknown = sorted(set(settings) - set(known))
    for name in unknown:
        value = settings.pop(name)
        if value is not None and value is not False:
            raise ValueError(
                f"it sets {name[:80]!r} = {str(value)[:80]}, which the installed {unet_class.__name__} does not know; "
                f"use the release of diffusers that it was made with"
            )
    return settings, unknown


def check_settings(unet_class: Any, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the setting of a wrong type or size, or that the class does not know."""
    known = _known(unet_class)
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{name[:80]!r} is a setting that {unet_class.__name__} does not know")
        largest = LARGEST.get(name, MAX_CHANNELS)
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) > MAX_LAYERS or not all(_is_small(part, largest) for part in values):
            raise ValueError(f"{name} = {str(value)[:80]} is larger than any network here")
        if not any(_fits(value, kind) for kind in known[name]):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in known[name])
            raise ValueError(f"{name} = {str(value)[:80]!r} is of the wrong type; it must be {wanted}")


def check_computes(unet: nn.Module, image_shape: Sequence[int], condition: Mapping[str, Tensor] | None = None) -> None:
    """Raise a ValueError if a U-Net without memory (on "meta") cannot compute an image (C, H, W); costs no memory.

    condition: what it takes besides, each (1, ...).
    """
    told = {name: value.to("meta") for name, value in (condition or {}).items()}
    try:
        with torch.device("meta"), torch.no_grad():
            output = call(unet, torch.empty(1, *image_shape), torch.empty(1), told)
        if output.shape[2:] != tuple(image_shape[1:]):
            raise ValueError(f"its output is {tuple(output.shape[2:])}")
    except BUILDING_ERRORS as error:
        raise ValueError(f"it cannot compute images of shape {tuple(image_shape)}: {brief(error)}") from error


def no_plain_floats(weight: Tensor) -> str:
    """What is wrong with a weight of another type: integers, complex numbers, floats of 8 bits with scales apart."""
    return f"holds {weight.dtype}, not plain floating-point numbers; convert it to torch.float32"


def brief(error: BaseException) -> str:
    """What an error says, on one line of bounded length."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def same_setting(*values: Any) -> bool:
    """Whether two settings are equal; a config that was read back has lists for tuples."""
    first, second = (list(value) if isinstance(value, tuple) else value for value in values)
    return bool(first == second)


def _known(unet_class: Any) -> dict[str, tuple[Any, ...]]:
    """Types by the name of a setting, as the constructor declares them."""
    constructor = inspect.unwrap(unet_class.__init__)
    hints = get_type_hints(constructor)
    names = [name for name in inspect.signature(constructor).parameters if name != "self"]
    unions = (Union, UnionType)
    kinds = {name: hints.get(name, bool) for name in names}  # what diffusers leaves undeclared are switches
    return {name: get_args(kind) if get_origin(kind) in unions else (kind,) for name, kind in kinds.items()}


def _is_small(value: Any, largest: int) -> bool:
    return not isinstance(value, int | float) or abs(value) <= largest  # NaN is not


def _fits(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    if arguments:  # tuple[int, ...] or tuple[int, int]; a list in JSON
        return isinstance(value, list | tuple) and all(_fits(part, arguments[0]) for part in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int and type(value) is float:
        return value.is_integer()
    if kind is bool and value is None:  # published configs have null for a switch that is off
        return True
    return type(value) is kind
