"""Schedules as they are written down: by a name, or by a small dictionary of plain JSON values.

"vp_sde"   {"kind": "vp_sde", "beta_min": 0.1, "beta_max": 20.0}
"ve_sde"   {"kind": "ve_sde", "sigma_min": 0.01, "sigma_max": 50.0}
"edm"      {"kind": "edm", "sigma_min": 0.002, "sigma_max": 80.0}
"flow"     {"kind": "flow"}
"linear"   {"kind": "linear", "steps": 1000, "scale": true}
"cosine"   {"kind": "cosine", "steps": 1000}
           {"kind": "betas", "betas": [...]}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from optcov.bundle.errors import BundleError
from optcov.schedule import Schedule

MAX_STEPS = 100_000

Builder = tuple[Callable[..., Schedule], Mapping[str, Any]]  # with the types of its settings

_FAMILIES: dict[str, Builder] = {  # of discrete schedules; the others are classes that know their settings
    "linear": (Schedule.linear, {"steps": int, "scale": bool}),
    "cosine": (Schedule.cosine, {"steps": int}),
    "betas": (Schedule.from_betas, {"betas": list}),
}


def _builders() -> dict[str, Builder]:
    """All there are by name; a class that somebody adds is among them."""
    return {**{name: (kind, _numbers(kind)) for name, kind in Schedule.registry.items()}, **_FAMILIES}


def _numbers(kind: type[Schedule]) -> dict[str, Any]:
    return dict.fromkeys(inspect.signature(kind).parameters, (int, float))


def build_schedule(spec: str | Mapping[str, Any] | Schedule) -> Schedule:
    """Build a schedule from its name or its dictionary; a schedule is returned as it is."""
    if isinstance(spec, Schedule):
        return spec
    if not isinstance(spec, str | Mapping):
        raise BundleError(f"schedule = {spec!r:.80} is not known; pass a Schedule or a name such as 'linear'")
    options: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = options.pop("kind", None)
    builders = _builders()
    if not isinstance(kind, str) or kind not in builders or (isinstance(spec, str) and kind == "betas"):
        names = ", ".join(name for name in builders if name != "betas")
        raise BundleError(f"unknown schedule {kind!r}; choose one of {names}, or give its betas")
    build, known = builders[kind]
    for name, value in options.items():
        if name not in known:
            raise BundleError(f"schedule {kind!r} has no setting {name!r}; it has {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            raise BundleError(f"schedule {kind!r}: {name} = {str(value)[:50]!r} is of the wrong type")
    if options.get("steps", 1) > MAX_STEPS or len(options.get("betas", ())) > MAX_STEPS:
        raise BundleError(f"schedule {kind!r} has more than {MAX_STEPS} steps")
    try:
        return build(**options)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BundleError(f"schedule {kind!r}: {error}") from error


def schedule_spec(schedule: Schedule) -> dict[str, Any]:
    """Describe a schedule by its dictionary, with the name of its family where it has one."""
    return dict(_spec(schedule))


@lru_cache(maxsize=64)  # every trajectory of a bundle asks it of the same few schedules
def _spec(schedule: Schedule) -> dict[str, Any]:
    spec = schedule.spec()
    if spec["kind"] not in _builders():
        raise BundleError(f"{schedule!r} cannot be written down; give its class a name")
    return spec
