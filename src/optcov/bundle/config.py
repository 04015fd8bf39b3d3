"""config.json of a bundle: what the weights mean. Strict: an unknown, missing or wrong entry is an error."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

from optcov.bundle.errors import BundleError
from optcov.bundle.schedules import build_schedule, schedule_spec
from optcov.networks import TimeArgument
from optcov.networks.unet_config import MAX_CLASSES
from optcov.prediction import PARAMETERISATIONS
from optcov.schedule import Schedule

FORMAT, VERSIONS = "optcov-bundle", (1, 2)
# entries that version 2 may have, with what their absence means; a bundle that needs none of them is of version 1
OPTIONAL: Mapping[str, Any] = MappingProxyType(
    {"classes": None, "empty_condition": [], "decoder": False, "precision": None, "given_network": None}
)
PRECISIONS = ("float16", "bfloat16")
MAX_CONDITIONS = 16
MAX_IMAGE_VALUES = 2**26
MAX_NUMBER = 1e9  # of a time argument or of data: its square is still far inside of float32
MIN_WIDTH = 1e-6  # of the data's range, relative to its ends and at least to 1e-3
_CONDITION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
MAX_AXES = 8  # of one data point
_HEAD_NAME = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)


@final
@dataclass(frozen=True)
class BundleConfig:
    """What the weights of a bundle mean."""

    schedule: Schedule  # the network's own
    time_argument: TimeArgument
    image_shape: tuple[int, ...]  # (C, H, W), or any other with a network that the bundle does not hold
    parameterisation: str = "epsilon"
    learned_range: bool = False
    data_range: tuple[float, float] | None = (-1.0, 1.0)
    heads: tuple[str, ...] = ()
    noise_caps: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    classes: int | None = None  # that the network tells apart, without an empty one; None: it takes no labels
    empty_condition: tuple[str, ...] = ()  # names of the tensors in conditions.safetensors
    decoder: bool = False  # whether there is one, which turns latents into images
    precision: str | None = None  # of the network's weights, if it is a half one
    given_network: Mapping[str, Any] | None = (
        None  # class, layer and weights of a network that the bundle does not hold
    )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        chosen = {
            "classes": self.classes,
            "empty_condition": sorted(self.empty_condition),
            "decoder": self.decoder,
            "precision": self.precision,
            "given_network": None if self.given_network is None else dict(self.given_network),
        }
        optional = {name: value for name, value in chosen.items() if value != OPTIONAL[name]}
        return {
            "format": FORMAT,
            "version": 2 if optional else 1,
            "schedule": schedule_spec(self.schedule),
            "time_argument": {"scale": self.time_argument.scale, "shift": self.time_argument.shift},
            "prediction_type": self.parameterisation,
            "learned_range": self.learned_range,
            "data_range": None if self.data_range is None else list(self.data_range),
            "image_shape": list(self.image_shape),
            "noise_caps": dict(self.noise_caps),
            "heads": list(self.heads),
            **optional,
        }

    @staticmethod
    def from_json(content: Any) -> BundleConfig:
        """Check every entry and build the config."""
        entries = _entries(content)
        return BundleConfig(
            schedule=build_schedule(_mapping(entries["schedule"], "schedule")),
            time_argument=_time_argument(entries["time_argument"]),
            image_shape=_image_shape(entries["image_shape"], entries["given_network"] is not None),
            parameterisation=_choice(entries["prediction_type"], PARAMETERISATIONS, "prediction_type"),
            learned_range=_choice(entries["learned_range"], (False, True), "learned_range"),
            data_range=_data_range(entries["data_range"]),
            heads=_head_names(entries["heads"]),
            noise_caps=_noise_caps(entries["noise_caps"]),
            classes=_classes(entries["classes"]),
            empty_condition=_condition_names(entries["empty_condition"]),
            decoder=_choice(entries["decoder"], (False, True), "decoder"),
            precision=_choice(entries["precision"], (None, *PRECISIONS), "precision"),
            given_network=_given_network(entries["given_network"]),
        )


def check_head_name(name: object) -> str:
    """A head's name is also a file's name, so only letters, digits and underscores will do."""
    if not isinstance(name, str) or not _HEAD_NAME.fullmatch(name):
        raise BundleError(f"{str(name)[:80]!r} is no name for a head; use lower-case letters, digits and underscores")
    return name


def _require(fine: bool, name: str, value: Any, what: str) -> None:
    if not fine:
        raise BundleError(f'"{name}" is {str(value)[:80]!r}, {what}')


def _entries(content: Any) -> Mapping[str, Any]:
    entries = _mapping(content, "config")
    _require(entries.get("format") == FORMAT, "format", entries.get("format"), f"not {FORMAT!r}")
    version = entries.get("version")
    read = " and ".join(map(str, VERSIONS))
    _require(type(version) is int and version in VERSIONS, "version", version, f"but this release reads {read}")
    known = {
        "format", "version", "schedule", "time_argument", "prediction_type", "learned_range", "data_range",
        "image_shape", "noise_caps", "heads",
    }  # fmt: skip
    allowed = known | (set(OPTIONAL) if version == 2 else set())
    missing, unknown = sorted(known - set(entries)), sorted(set(entries) - allowed)
    if missing or unknown:
        raise BundleError(f"it lacks {missing} or has the unknown {[str(name)[:50] for name in unknown[:5]]}")
    return {**OPTIONAL, **entries}


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    _require(isinstance(value, dict), name, value, "not an object")
    return value  # type: ignore[no-any-return]


def _time_argument(value: Any) -> TimeArgument:
    numbers = [_mapping(value, "time_argument").get(name) for name in ("scale", "shift")]
    fine = all(_is_number(number) for number in numbers)
    _require(fine, "time_argument", value, f"not a finite number up to {MAX_NUMBER:g} as scale and as shift")
    return TimeArgument(*map(float, numbers))  # type: ignore[arg-type]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER  # NaN is not


def _choice(value: Any, choices: tuple[Any, ...], name: str) -> Any:
    fine = any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices)
    _require(fine, name, value, f"but it must be one of {', '.join(map(str, choices))}")
    return value


def _image_shape(value: Any, of_any_kind: bool) -> tuple[int, ...]:
    """of_any_kind: data that is not images, such as vectors, which a user's own networks take."""
    sizes = value if isinstance(value, list) else []
    fine = all(type(size) is int and size > 0 for size in sizes)
    if of_any_kind:
        _require(fine and 1 <= len(sizes) <= MAX_AXES, "image_shape", value, f"not 1 to {MAX_AXES} positive integers")
    else:
        _require(fine and len(sizes) == 3, "image_shape", value, "not three positive integers [C, H, W]")
    _require(math.prod(sizes) <= MAX_IMAGE_VALUES, "image_shape", value, f"more than {MAX_IMAGE_VALUES} values")
    return tuple(sizes)


def _data_range(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    ends = value if isinstance(value, list) else []
    fine = len(ends) == 2 and all(_is_number(end) for end in ends) and ends[0] < ends[1]
    what = f"not [low, high] with low < high and neither beyond {MAX_NUMBER:g}, or null"
    _require(fine, "data_range", value, what)
    low, high = float(ends[0]), float(ends[1])
    wide = high - low >= MIN_WIDTH * max(abs(low), abs(high), 1e-3)
    _require(wide, "data_range", value, "which is too narrow to tell its ends apart")
    return low, high


def _head_names(value: Any) -> tuple[str, ...]:
    _require(isinstance(value, list) and len(value) <= 64, "heads", value, "not a list of at most 64 names")
    names = tuple(check_head_name(name) for name in value)
    _require(len(set(names)) == len(names), "heads", value, "which names one head twice")
    return names


def _classes(value: Any) -> int | None:
    fine = value is None or (type(value) is int and 1 <= value <= MAX_CLASSES)
    _require(fine, "classes", value, f"not a number of classes from 1 to {MAX_CLASSES}, or null")
    return None if value is None else int(value)


def _condition_names(value: Any) -> tuple[str, ...]:
    fine = isinstance(value, list) and len(value) <= MAX_CONDITIONS
    fine = fine and all(isinstance(name, str) and _CONDITION_NAME.fullmatch(name) for name in value)
    _require(fine, "empty_condition", value, f"not a list of at most {MAX_CONDITIONS} names of arguments")
    _require(len(set(value)) == len(value), "empty_condition", value, "which names one argument twice")
    return tuple(value)


def _given_network(value: Any) -> Mapping[str, Any] | None:
    if value is None:
        return None
    found = _mapping(value, "given_network")
    texts = {name: found.get(name) for name in ("class", "layer", "weights")}
    fine = set(found) == set(texts) and all(isinstance(text, str) and len(text) <= 200 for text in texts.values())
    _require(fine, "given_network", value, "not the class, the layer and the fingerprint of a network")
    return MappingProxyType(dict(found))


def _noise_caps(value: Any) -> Mapping[str, float | None]:
    caps = _mapping(value, "noise_caps")
    for name, cap in caps.items():
        fine = cap is None or (_is_number(cap) and cap > 0)
        _require(fine, "noise_caps", f"{name[:50]}: {str(cap)[:20]}", "not a positive number or null")
    return MappingProxyType(dict(caps))
