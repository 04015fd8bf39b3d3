"""What a bundle holds, as plain JSON values, for people and machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from optcov.bundle.bundle import Bundle
from optcov.bundle.loading import find_bundle, load
from optcov.bundle.schedules import schedule_spec
from optcov.networks import head_config


def describe(source: str | Path | Bundle) -> dict[str, Any]:
    """Describe a bundle: network, schedule, heads, numbers, trajectories, provenance, sizes of its files in bytes."""
    directory = None if isinstance(source, Bundle) else find_bundle(source)
    bundle = source if isinstance(source, Bundle) else load(source)
    return {
        "bundle": {
            "name": bundle.name,
            "directory": None if directory is None else str(directory),
            "image_shape": list(bundle.image_shape),
            "data_range": None if bundle.data_range is None else list(bundle.data_range),
            "noise_caps": dict(bundle.noise_caps),
        },
        "network": _network(bundle),
        "schedule": _schedule(bundle),
        "heads": {name: {**head_config(head), "parameters": _parameters(head)} for name, head in bundle.heads.items()},
        "numbers_per_time": _numbers(bundle),
        "optimal_trajectories": _trajectories(bundle),
        "provenance": dict(bundle.provenance),
        "sizes": {} if directory is None else _sizes(directory),
    }


def _network(bundle: Bundle) -> dict[str, Any]:
    network = bundle.network
    return {
        "class": type(bundle.unet).__name__,
        "parameters": _parameters(bundle.unet),
        "prediction_type": network.parameterisation,
        "learned_range": network.learned_range,
        "time_argument": {"scale": network.time_argument.scale, "shift": network.time_argument.shift},
        "fingerprint": bundle.fingerprint,
    }


def _schedule(bundle: Bundle) -> dict[str, Any]:
    spec = schedule_spec(bundle.schedule)
    if "betas" in spec:
        spec |= {"betas": f"{len(spec['betas'])} betas from {spec['betas'][0]:.3g} to {spec['betas'][-1]:.3g}"}
    return spec


def _numbers(bundle: Bundle) -> dict[str, Any]:
    numbers = bundle.numbers
    if numbers is None:
        return {}
    return {
        "times": len(numbers.times),
        **{
            name: {"first": float(values[0]), "middle": float(values[len(values) // 2]), "last": float(values[-1])}
            for name, values in numbers.tensors().items()
            if name != "times"
        },
    }


def _trajectories(bundle: Bundle) -> dict[str, list[int]]:
    """Stored lengths by method and kind of schedule."""
    found: dict[str, list[int]] = {}
    for entry in bundle.trajectories:
        found.setdefault(f"{entry.method}, {schedule_spec(entry.schedule)['kind']}", []).append(len(entry.trajectory))
    return found


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    return {**sizes, "in all": sum(sizes.values())}
