"""What a bundle holds: as plain JSON values, in words for a prompt and the commands, and as a page for a notebook."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from optcov.bundle.bundle import Bundle
from optcov.bundle.conditions import labels_in_rows
from optcov.bundle.loading import find_bundle, load
from optcov.bundle.matched import prepared
from optcov.bundle.recommendation import possible_covariances, ratios_of, recommendations
from optcov.bundle.sampler import draw_many
from optcov.bundle.schedules import schedule_spec
from optcov.data.export import grid, png_bytes
from optcov.data.images import to_8bit
from optcov.methods import METHODS
from optcov.networks import head_config

STAGES = {"stage1": "trained by", "heads": "fitted by"}  # sections of the history in words
HOUSEKEEPING = {"checkpoint_every", "keep", "keep_every", "log_every"}  # of a training, but not of its result
PREDICTS = {
    "epsilon": "the noise",
    "sample": "the clean image",
    "v_prediction": "the velocity",
    "flow_prediction": "the velocity of a flow",
}
THUMBNAILS, STEPS = 8, 10
SMALL = 10_000_000  # weights times images up to which drawing some takes seconds on a CPU


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
        "covariances": possible_covariances(bundle),
        "recommended": {purpose: asdict(best) for purpose, best in recommendations(bundle).items()},
        "optimal_trajectories": _trajectories(bundle),
        "matched_steps": list(prepared(bundle.matched, bundle.schedule)),
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
        "classes": bundle.classes,
        "empty_condition": sorted(bundle.empty_condition),
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


def lines(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A description as pairs of a name and a text, for display."""
    about, network = content["bundle"], content["network"]
    yield about["name"], about["directory"] or "in memory"
    pixels = "any value" if about["data_range"] is None else "{:g} to {:g}".format(*about["data_range"])
    yield "images", f"{' x '.join(map(str, about['image_shape']))}, {pixels}"
    what = PREDICTS[network["prediction_type"]] + (" and a learned range" if network["learned_range"] else "")
    yield "network", f"{network['class']}, {network['parameters']:,} weights, predicts {what}"
    if network["classes"] is not None:
        empty = "one more stands for no class" if network["empty_condition"] else "none stands for no class"
        yield "classes", f"{network['classes']}; {empty}"
    argument = network["time_argument"]
    since = f"(t - {argument['shift']:g})" if argument["shift"] else "t"
    yield "", f"sees time t as {argument['scale']:g} {since}; fingerprint {network['fingerprint'][:16]}"
    schedule = dict(content["schedule"])
    yield "schedule", ", ".join([schedule.pop("kind"), *_pairs(schedule)])
    yield from _heads_lines(content["heads"])
    yield from _numbers_lines(content["numbers_per_time"])
    yield "covariances", ", ".join(content["covariances"])
    yield from _recommended_lines(content["recommended"])
    yield from _trajectories_lines(content["optimal_trajectories"])
    if content["matched_steps"]:
        yield "matched noise", f"for {', '.join(map(str, content['matched_steps']))} steps of Matched 2M"
    caps = {name: "none" if cap is None else cap for name, cap in about["noise_caps"].items()}
    yield "noise caps", ", ".join(_pairs(caps)) or "the paper's"
    history = {name: part for name, part in content["provenance"].items() if name not in ("calibration", "fit")}
    for name, part in history.items():
        yield STAGES.get(name, name), ", ".join(_pairs(part)) if isinstance(part, Mapping) else str(part)
    yield from _calibration_lines(content["provenance"].get("calibration"))
    if content["sizes"]:
        sizes = _by_part(content["sizes"]).items()
        units = ((name, *((size / 1e6, "MB") if size >= 1e6 else (size / 1e3, "kB"))) for name, size in sizes)
        yield "sizes", ", ".join(f"{name} {size:.1f} {unit}" for name, size, unit in units)


def _heads_lines(heads: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    if not heads:
        yield "heads", "none; optcov fit makes them"
    for number, (name, head) in enumerate(heads.items()):
        hidden = ", hidden layers" if head.get("hidden") else ""
        yield "" if number else "heads", f"{name:6}{head['kind']}{hidden}, {head['parameters']:,} weights"


def _numbers_lines(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not numbers:
        yield "per time", "none; optcov fit measures them"
        return
    yield "per time", f"measured at {numbers['times']} times, from the first to the last"
    for name, text in (
        ("mean_square_noise", "E mean(eps_hat^2)"),
        ("mean_square_residual", "E mean((eps - eps_hat)^2)"),
    ):
        if name in numbers:
            yield "", f"{text:26} {numbers[name]['first']:.3g} to {numbers[name]['last']:.3g}"


def _recommended_lines(best: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What to use for which purpose, and the reasons, which they often share."""
    yield "recommended", ", ".join(f"for {purpose} {_with_row(one['name'])}" for purpose, one in best.items())
    for why in dict.fromkeys(one["why"] for one in best.values()):
        names = " and ".join(dict.fromkeys(one["name"] for one in best.values() if one["why"] == why))
        yield "", f"{names}: {why}"


def _with_row(name: str) -> str:
    """A method by its name; a covariance with the method that steps by it, which is what commands take."""
    row = next((method.name for method in METHODS.values() if method.covariance == name), None)
    return name if row is None else f"{name} ({row})"


def _trajectories_lines(found: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str]]:
    if not found:
        yield "optimal times", "none; optcov trajectory finds them"
    for number, (name, lengths) in enumerate(found.items()):
        some = f"{min(lengths)} to {max(lengths)}"
        whole = len(lengths) == max(lengths) - min(lengths) + 1
        steps = some if whole else f"{len(lengths)} lengths from {some}"
        yield "" if number else "optimal times", f"{name}: {steps} steps"


def _calibration_lines(record: Any) -> Iterator[tuple[str, str]]:
    """Predicted over measured by time; what does not fit is left out."""
    if not isinstance(record, Mapping) or not record:
        return
    yield "calibration", "of heads: predicted / measured on held-out images, by time; 1 is perfect"
    for name in record:
        if (ratios := ratios_of(record, name)) is not None:
            yield "", f"{name:5}" + "".join(f"{ratio:5.2f}" for ratio, _ in ratios)


def _pairs(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each value after its name; nested names are joined, long values shortened."""
    for name, value in values.items():
        words = f"{prefix}{name.replace('_', ' ')}"
        if name in HOUSEKEEPING:
            continue
        if isinstance(value, Mapping) and set(value) == {"digest", "is"}:  # digests are for machines
            yield from [f"{words} {value['is']}"] if value["is"] else []
        elif isinstance(value, Mapping):
            yield from _pairs(value, f"{words} ")
        else:
            text = f"{value:g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
            yield f"{words} {text if len(text) <= 40 else f'{text[:16]}...'}"


def _by_part(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the directories and files right below the bundle."""
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.split("/")[0]
        parts[top] = parts.get(top, 0) + size
    return parts


def text(bundle: Bundle) -> str:
    """What it is, a line each; its long history is left to `optcov info`."""
    return "\n".join(f"{name:13} {words}" for name, words in lines(_without_history(describe(bundle))))


def page(bundle: Bundle) -> str:
    """The same as a table, with a few images if the network is small enough to draw them at once."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(words)}</td></tr>"
        for name, words in lines(_without_history(describe(bundle)))
    )
    return f"<table>{rows}</table>{_thumbnails(bundle)}"


def _without_history(content: Mapping[str, Any]) -> dict[str, Any]:
    """All but how it was made."""
    calibration = content["provenance"].get("calibration")
    return {**content, "provenance": {} if calibration is None else {"calibration": calibration}}


def _thumbnails(bundle: Bundle) -> str:
    images = len(bundle.image_shape) == 3 and bundle.image_shape[0] in (1, 3) and bundle.data_range is not None
    if not images or _parameters(bundle.unet) > SMALL:
        return ""
    classes = labels_in_rows(bundle.class_numbers, THUMBNAILS)
    drawn = draw_many(bundle, THUMBNAILS, classes, THUMBNAILS, progress=False, method=None, steps=STEPS)
    picture = base64.b64encode(png_bytes(grid(to_8bit(drawn), THUMBNAILS))).decode()
    return f"<img alt='images drawn by the bundle' src='data:image/png;base64,{picture}'>"
