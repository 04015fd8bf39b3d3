"""Matched noise in a bundle: measured for a trajectory, stored as one file, found by schedule and number of steps.

matched.safetensors holds N.power, N.shift and N.gain for entries N = 0, 1, ..., and in its metadata, as JSON, the
schedule, the times and the eta of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from optcov.bundle.conditions import labels_in_rows
from optcov.bundle.errors import BundleError
from optcov.bundle.schedules import build_schedule, schedule_key, schedule_spec
from optcov.schedule import Schedule, check_whole
from optcov.solvers import DataMoments, MatchedNoise, match_noise
from optcov.solvers.multistep import ETA
from optcov.trajectory import Trajectory

if TYPE_CHECKING:
    from optcov.bundle.bundle import Bundle

SAMPLES = 512  # start noises
NAMES = ("power", "shift", "gain")
MOST = 1000  # entries of one file
_OPTIONS = ("eta", "samples", "seed", "rings", "floor", "shrink", "condition", "batch_size", "progress")


def times_of(schedule: Schedule, steps: int) -> Trajectory:
    """Karras times whose last step starts at a noise-to-signal ratio of 1 / steps."""
    return Trajectory.karras(schedule, check_whole("steps", steps, 2, BundleError), first_sigma=1 / steps)


def measure(bundle: Bundle, images: Any, trajectory: Trajectory, options: Mapping[str, Any]) -> MatchedNoise:
    """Match the noise of a bundle's network along a trajectory to training images, a tensor or a path.

    A network with classes draws each in turn, unless a condition is given.
    """
    data = bundle.data_of(images, "train")
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise BundleError(f"with_matched_noise has no option {unknown[0]!r}; it has trajectory, {', '.join(_OPTIONS)}")
    options = {"eta": ETA, "samples": SAMPLES, "device": bundle.device, **options}
    options["samples"] = check_whole("samples", options["samples"], 2, BundleError)
    if "condition" not in options:
        options["condition"] = labels_in_rows(bundle.class_numbers, options["samples"])
    network = bundle.network.with_only_heads()
    return match_noise(network, bundle.schedule, trajectory, DataMoments.of(data.x_0()), **options)


def with_entry(entries: Sequence[MatchedNoise], new: MatchedNoise) -> tuple[MatchedNoise, ...]:
    """The entries with a new one, in the place of an older one of the same schedule and number of steps."""
    return (*(entry for entry in entries if key(entry) != key(new)), new)


def find(entries: Sequence[MatchedNoise], schedule: Schedule, steps: int, name: str) -> MatchedNoise:
    """Look one up; the error says how to measure it."""
    here = prepared(entries, schedule)
    if steps not in here:
        lengths = ", ".join(map(str, here)) or "none"
        raise BundleError(
            f"{name} has no matched noise for {steps} steps on {schedule!r} (it has: {lengths}); measure it by "
            f"bundle = bundle.with_matched_noise(images, steps={steps}), with a few hundred training images, or "
            f"take Bridge 2M, which needs none"
        )
    return here[steps]


def prepared(entries: Sequence[MatchedNoise], schedule: Schedule) -> dict[int, MatchedNoise]:
    """The entries of a schedule by number of steps, least first."""
    wanted = schedule_key(schedule)
    here = {steps: entry for entry in entries for spec, steps in [key(entry)] if spec == wanted}
    return dict(sorted(here.items()))


def key(entry: MatchedNoise) -> tuple[str, int]:
    """Schedule and number of steps."""
    return schedule_key(entry.schedule), len(entry.trajectory)


def to_file(entries: Sequence[MatchedNoise]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file."""
    tensors = {f"{place}.{name}": value for place, e in enumerate(entries) for name, value in e.tensors().items()}
    described = [
        {"schedule": schedule_spec(e.schedule), "times": list(e.trajectory.times), "eta": e.eta} for e in entries
    ]
    return tensors, {"entries": json.dumps(described, sort_keys=True)}


def from_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], image_shape: Sequence[int]
) -> tuple[MatchedNoise, ...]:
    """Check and build; anything unknown or missing is refused."""
    try:
        described = json.loads(metadata.get("entries", ""))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BundleError("its metadata do not describe its entries as JSON") from error
    if not isinstance(described, list) or len(described) > MOST:
        raise BundleError(f"its metadata are not a list of at most {MOST} entries")
    wanted = {f"{place}.{name}" for place in range(len(described)) for name in NAMES}
    if set(tensors) != wanted:
        raise BundleError(
            f"it lacks {sorted(wanted - set(tensors))} or has the unknown {sorted(set(tensors) - wanted)}"
        )
    found = [
        _entry(content, {name: tensors[f"{place}.{name}"] for name in NAMES}) for place, content in enumerate(described)
    ]
    for entry in found:
        if entry.shape != tuple(image_shape):
            raise BundleError(f"its entries are for images of shape {entry.shape}, not {tuple(image_shape)}")
    if len({key(entry) for entry in found}) < len(found):
        raise BundleError("it has two entries of the same schedule and number of steps")
    return tuple(found)


def _entry(content: Any, tensors: Mapping[str, Tensor]) -> MatchedNoise:
    if not isinstance(content, dict) or set(content) != {"schedule", "times", "eta"}:
        raise BundleError("an entry needs exactly schedule, times and eta")
    times, eta = content["times"], content["eta"]
    if not isinstance(times, list) or not all(type(t) in (int, float) for t in times):
        raise BundleError("the times of an entry must be a list of numbers")
    if not isinstance(content["schedule"], dict) or type(eta) not in (int, float):
        raise BundleError("an entry needs an object as schedule and a number as eta")
    try:
        return MatchedNoise(build_schedule(content["schedule"]), Trajectory(times), float(eta), **tensors)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise BundleError(f"an entry is no matched noise: {error}") from error
