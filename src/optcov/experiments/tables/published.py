"""The paper's numbers and settings, as data files with their source (see paper/*.json beside this module)."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

NAMES = ("fid", "timesteps", "bpd", "cost", "iddpm", "repeats", "normalised", "settings")

SETTING_OF_SCHEDULE = {  # the paper trained networks of all three on CIFAR10
    "linear": "CIFAR10 (LS)",
    "cosine": "CIFAR10 (CS)",
    "vp_sde": "CIFAR10 (VP SDE)",
}


@cache
def published(name: str) -> dict[str, Any]:
    """One of the paper's tables, or its settings.

    >>> published("fid")["settings"]["CIFAR10 (LS)"]["rows"]["SN-DDIM"][:2]
    [12.19, 4.28]
    """
    if name not in NAMES:
        raise ValueError(f"the paper has no table {name!r}; it has {', '.join(NAMES)}")
    text = (resources.files(__package__) / "paper" / f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def check_setting(setting: str) -> str:
    """Refuse a data set that the paper does not have."""
    known = published("settings")["settings"]
    if setting not in known:
        raise ValueError(f"the paper has no setting {setting!r}; it has {', '.join(known)}")
    return setting


def paper_images(setting: str | None, use: str) -> int | None:
    """How many training images of a setting served as trajectory_images or reference_images; None if it does not say.

    >>> paper_images("CelebA 64x64", "trajectory_images")
    10000
    """
    found: int | None = published("settings")["settings"].get(setting, {}).get(use)
    return found


def distance_steps(setting: str | None) -> tuple[int, ...]:
    """The numbers of steps of a setting's distances; those of CIFAR10 (LS) if the paper has none.

    >>> distance_steps("ImageNet 64x64")
    (25, 50, 100, 200, 400, 4000)
    """
    settings = published("fid")["settings"]
    return tuple(settings.get(setting, settings["CIFAR10 (LS)"])["steps"])


def published_value(name: str, setting: str | None, row: str, steps: int, kind: str | None = None) -> float | None:
    """The paper's number of a row at K steps; None if it has none. kind: ET or OT, for the table of likelihoods."""
    section = published(name)["settings"].get(setting)
    if section is None or steps not in section["steps"]:
        return None
    rows = section["rows"] if kind is None else section["rows"].get(kind, {})
    found = rows.get(row)
    if found is None:
        return None
    value = found["mean"] if isinstance(found, dict) else found[section["steps"].index(steps)]
    return float(value)
