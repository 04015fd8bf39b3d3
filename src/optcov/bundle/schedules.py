"""Schedules, and trajectories on them, as they are written down: by names and small dictionaries of plain JSON values.

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
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, final

import torch

from optcov.bundle.errors import BundleError
from optcov.methods import find_method
from optcov.schedule import Schedule
from optcov.trajectory import Trajectory

MAX_STEPS = 100_000
MAX_SCHEDULES = 16  # of the trajectories of one bundle; each takes megabytes

Builder = tuple[Callable[..., Schedule], Mapping[str, Any]]  # with the types of its settings

_FAMILIES: dict[str, Builder] = {  # of discrete schedules; the others are classes that know their settings
    "linear": (Schedule.linear, {"steps": int, "scale": bool}),
    "cosine": (Schedule.cosine, {"steps": int}),
    "betas": (Schedule.from_betas, {"betas": list}),
}


def _builders() -> dict[str, Builder]:
    """All there are by name; a class that somebody adds is among them, with numbers as settings."""
    named = Schedule.registry.items()
    numbers = {name: dict.fromkeys(inspect.signature(kind).parameters, (int, float)) for name, kind in named}
    return {**{name: (kind, numbers[name]) for name, kind in named}, **_FAMILIES}


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


@final
@dataclass(frozen=True)
class StoredTrajectory:
    """One trajectory, with what it was optimised for."""

    schedule: Schedule
    method: str
    trajectory: Trajectory

    @cached_property
    def key(self) -> tuple[str, str, int]:
        """Schedule, method and number of steps: what a trajectory is looked up by."""
        return schedule_key(self.schedule), self.method, len(self.trajectory)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        times = list(self.trajectory.times)
        return {"schedule": schedule_spec(self.schedule), "method": self.method, "times": times}

    @staticmethod
    def from_json(content: Any, schedules: dict[str, Schedule] | None = None) -> StoredTrajectory:
        """Check and build; times must be times of the schedule.

        schedules: those that other trajectories brought, to be shared: a thousand of them are on a few schedules.
        """
        if not isinstance(content, dict) or set(content) != {"schedule", "method", "times"}:
            raise BundleError("a stored trajectory needs exactly schedule, method and times")
        times = content["times"]
        if not isinstance(times, list) or not all(type(t) in (int, float) for t in times):
            raise BundleError("the times of a stored trajectory must be a list of numbers")
        if not isinstance(content["schedule"], dict) or not isinstance(content["method"], str):
            raise BundleError("a stored trajectory needs an object as schedule and a text as method")
        schedule = _shared_schedule(content["schedule"], {} if schedules is None else schedules)
        try:
            trajectory = Trajectory(times)
            schedule.check_times(torch.tensor(trajectory.times, dtype=torch.float64))
            return StoredTrajectory(schedule, find_method(content["method"]).name, trajectory)
        except (ValueError, OverflowError, RuntimeError) as error:
            raise BundleError(f"a stored trajectory is not one: {error}") from error


def _shared_schedule(spec: dict[str, Any], known: dict[str, Schedule]) -> Schedule:
    key = json.dumps(spec, sort_keys=True)
    if key not in known:
        if len(known) == MAX_SCHEDULES:
            raise BundleError(f"its trajectories are on more than {MAX_SCHEDULES} schedules")
        known[key] = build_schedule(spec)
    return known[key]


def find_trajectory(stored: Sequence[StoredTrajectory], schedule: Schedule, method: str, K: int) -> Trajectory:
    """Look a trajectory up; the error lists the lengths there are."""
    here = [entry for entry in stored if entry.key[:2] == (schedule_key(schedule), method)]
    for entry in here:
        if len(entry.trajectory) == K:
            return entry.trajectory
    lengths = ", ".join(str(len(entry.trajectory)) for entry in here) or "none"
    raise BundleError(
        f"no optimal trajectory of {K} steps is stored for {method} on {schedule!r}; "
        f"stored lengths: {lengths}. Find more by optcov trajectory"
    )


def schedule_key(schedule: Schedule) -> str:
    """What stored things of a schedule are looked up by."""
    return json.dumps(schedule_spec(schedule), sort_keys=True)
