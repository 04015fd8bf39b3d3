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

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from optcov.bundle.errors import BundleError
from optcov.schedule import Schedule

MAX_STEPS = 100_000

_BUILDERS: dict[str, tuple[Callable[..., Schedule], dict[str, type | tuple[type, ...]]]] = {
    "vp_sde": (Schedule.vp_sde, {"beta_min": (int, float), "beta_max": (int, float)}),
    "ve_sde": (Schedule.ve_sde, {"sigma_min": (int, float), "sigma_max": (int, float)}),
    "edm": (Schedule.edm, {"sigma_min": (int, float), "sigma_max": (int, float)}),
    "flow": (Schedule.flow, {}),
    "linear": (Schedule.linear, {"steps": int, "scale": bool}),
    "cosine": (Schedule.cosine, {"steps": int}),
    "betas": (Schedule.from_betas, {"betas": list}),
}


def build_schedule(spec: str | Mapping[str, Any] | Schedule) -> Schedule:
    """Build a schedule from its name or its dictionary; a schedule is returned as it is."""
    if isinstance(spec, Schedule):
        return spec
    options: dict[str, Any] = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in _BUILDERS or (isinstance(spec, str) and kind == "betas"):
        names = ", ".join(name for name in _BUILDERS if name != "betas")
        raise BundleError(f"unknown schedule {kind!r}; choose one of {names}, or give its betas")
    build, known = _BUILDERS[kind]
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
    if spec["kind"] not in _BUILDERS:
        raise BundleError(f"{schedule!r} cannot be written down; use one of the schedules of optcov.Schedule")
    return spec
