"""Optimal trajectories as a bundle keeps them: by schedule, method and length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch

from optcov.bundle.errors import BundleError
from optcov.bundle.schedules import build_schedule, schedule_spec
from optcov.methods import find_method
from optcov.schedule import Schedule
from optcov.trajectory import Trajectory

MAX_SCHEDULES = 16  # of one bundle; each takes megabytes


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
        return _schedule_key(self.schedule), self.method, len(self.trajectory)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schedule": schedule_spec(self.schedule),
            "method": self.method,
            "times": list(self.trajectory.times),
        }

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
    here = [entry for entry in stored if entry.key[:2] == (_schedule_key(schedule), method)]
    for entry in here:
        if len(entry.trajectory) == K:
            return entry.trajectory
    lengths = ", ".join(str(len(entry.trajectory)) for entry in here) or "none"
    raise BundleError(
        f"no optimal trajectory of {K} steps is stored for {method} on {schedule!r}; "
        f"stored lengths: {lengths}. Find more by optcov trajectory"
    )


def _schedule_key(schedule: Schedule) -> str:
    return json.dumps(schedule_spec(schedule), sort_keys=True)
