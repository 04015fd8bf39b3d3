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
from optcov.prediction import PARAMETERISATIONS
from optcov.schedule import Schedule

FORMAT, VERSION = "optcov-bundle", 1
MAX_IMAGE_VALUES = 2**26
MAX_NUMBER = 1e9  # of a time argument or of data: its square is still far inside of float32
MIN_WIDTH = 1e-6  # of the data's range, relative to its ends and at least to 1e-3
_HEAD_NAME = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)


@final
@dataclass(frozen=True)
class BundleConfig:
    """What the weights of a bundle mean."""

    schedule: Schedule  # the network's own
    time_argument: TimeArgument
    image_shape: tuple[int, ...]  # (C, H, W)
    parameterisation: str = "epsilon"
    learned_range: bool = False
    data_range: tuple[float, float] | None = (-1.0, 1.0)
    heads: tuple[str, ...] = ()
    noise_caps: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "schedule": schedule_spec(self.schedule),
            "time_argument": {"scale": self.time_argument.scale, "shift": self.time_argument.shift},
            "prediction_type": self.parameterisation,
            "learned_range": self.learned_range,
            "data_range": None if self.data_range is None else list(self.data_range),
            "image_shape": list(self.image_shape),
            "noise_caps": dict(self.noise_caps),
            "heads": list(self.heads),
        }

    @staticmethod
    def from_json(content: Any) -> BundleConfig:
        """Check every entry and build the config."""
        entries = _entries(content)
        scale, shift = (_number(entries["time_argument"], name) for name in ("scale", "shift"))
        return BundleConfig(
            schedule=build_schedule(_mapping(entries["schedule"], "schedule")),
            time_argument=TimeArgument(scale, shift),
            image_shape=_image_shape(entries["image_shape"]),
            parameterisation=_choice(entries["prediction_type"], PARAMETERISATIONS, "prediction_type"),
            learned_range=_choice(entries["learned_range"], (False, True), "learned_range"),
            data_range=_data_range(entries["data_range"]),
            heads=_head_names(entries["heads"]),
            noise_caps=_noise_caps(entries["noise_caps"]),
        )


def check_head_name(name: object) -> str:
    """A head's name is also a file's name, so only letters, digits and underscores will do."""
    if not isinstance(name, str) or not _HEAD_NAME.fullmatch(name):
        raise BundleError(f"{str(name)[:80]!r} is no name for a head; use lower-case letters, digits and underscores")
    return name


def _entries(content: Any) -> Mapping[str, Any]:
    entries = _mapping(content, "config")
    if entries.get("format") != FORMAT:
        raise BundleError(f'"format" is {str(entries.get("format"))[:50]!r}, not {FORMAT!r}')
    if entries.get("version") != VERSION:
        raise BundleError(f'"version" is {str(entries.get("version"))[:50]!r}; this release reads {VERSION}')
    known = {
        "format", "version", "schedule", "time_argument", "prediction_type", "learned_range", "data_range",
        "image_shape", "noise_caps", "heads",
    }  # fmt: skip
    missing, unknown = sorted(known - set(entries)), sorted(set(entries) - known)
    if missing or unknown:
        raise BundleError(f"it lacks {missing} or has the unknown {[str(name)[:50] for name in unknown[:5]]}")
    return entries


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f'"{what}" is not an object but {type(value).__name__}')
    return value


def _number(container: Any, name: str) -> float:
    value: Any = _mapping(container, "time_argument").get(name)
    if not _is_number(value):
        raise BundleError(
            f'"{name}" of "time_argument" is not a finite number up to {MAX_NUMBER:g} but {str(value)[:50]!r}'
        )
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER  # NaN is not


def _choice(value: Any, choices: tuple[Any, ...], what: str) -> Any:
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise BundleError(f'"{what}" is {str(value)[:50]!r}; it must be one of {", ".join(map(str, choices))}')
    return value


def _image_shape(value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
        raise BundleError(f'"image_shape" is {str(value)[:80]}, not three positive integers [C, H, W]')
    if math.prod(sizes) > MAX_IMAGE_VALUES:
        raise BundleError(f'"image_shape" {sizes} has more than {MAX_IMAGE_VALUES} values')
    return tuple(sizes)


def _data_range(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    ends = value if isinstance(value, list) else []
    if len(ends) != 2 or not all(_is_number(end) for end in ends) or not ends[0] < ends[1]:
        raise BundleError(
            f'"data_range" is {str(value)[:80]}, not [low, high] with low < high and neither beyond {MAX_NUMBER:g}, '
            f"or null"
        )
    low, high = float(ends[0]), float(ends[1])
    if high - low < MIN_WIDTH * max(abs(low), abs(high), 1e-3):
        raise BundleError(f'"data_range" is {value}, which is too narrow to tell its ends apart')
    return low, high


def _head_names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise BundleError('"heads" is not a list of at most 64 names')
    names = tuple(check_head_name(name) for name in value)
    if len(set(names)) != len(names):
        raise BundleError('"heads" names one head twice')
    return names


def _noise_caps(value: Any) -> Mapping[str, float | None]:
    caps = _mapping(value, "noise_caps")
    for name, cap in caps.items():
        if cap is not None and (type(cap) not in (int, float) or not 0 < cap <= MAX_NUMBER):
            raise BundleError(f'"noise_caps" of {name[:50]!r} is {str(cap)[:50]!r}, not a positive number or null')
    return MappingProxyType(dict(caps))
