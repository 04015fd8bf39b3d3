"""A bundle in words: pairs of a name and a text, for the command line, a prompt and a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

STAGES = {"stage1": "trained by", "heads": "fitted by"}  # sections of the history in words
HOUSEKEEPING = {"checkpoint_every", "keep", "keep_every", "log_every"}  # of a training, but not of its result
PREDICTS = {
    "epsilon": "the noise",
    "sample": "the clean image",
    "v_prediction": "the velocity",
    "flow_prediction": "the velocity of a flow",
}


def lines(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A description as pairs of a name and a text, for the eye."""
    about, network = content["bundle"], content["network"]
    yield about["name"], about["directory"] or "in memory"
    pixels = "any value" if about["data_range"] is None else "{:g} to {:g}".format(*about["data_range"])
    yield "images", f"{' x '.join(map(str, about['image_shape']))}, {pixels}"
    what = PREDICTS[network["prediction_type"]] + (" and a learned range" if network["learned_range"] else "")
    yield "network", f"{network['class']}, {network['parameters']:,} weights, predicts {what}"
    argument = network["time_argument"]
    since = f"(t - {argument['shift']:g})" if argument["shift"] else "t"
    yield "", f"sees time t as {argument['scale']:g} {since}; fingerprint {network['fingerprint'][:16]}"
    schedule = dict(content["schedule"])
    yield "schedule", joined([schedule.pop("kind"), *pairs(schedule)])
    yield from _heads(content["heads"])
    yield from _numbers(content["numbers_per_time"])
    yield from _trajectories(content["optimal_trajectories"])
    caps = {name: "none" if cap is None else cap for name, cap in about["noise_caps"].items()}
    yield "noise caps", joined(pairs(caps)) or "the paper's"
    history = {name: part for name, part in content["provenance"].items() if name != "calibration"}
    for name, part in history.items():
        yield STAGES.get(name, name), joined(pairs(part)) if isinstance(part, Mapping) else str(part)
    yield from _calibration(content["provenance"].get("calibration"))
    if content["sizes"]:
        yield "sizes", joined(f"{name} {size_text(size)}" for name, size in _by_part(content["sizes"]).items())


def _heads(heads: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    if not heads:
        yield "heads", "none; optcov fit makes them"
    for number, (name, head) in enumerate(heads.items()):
        yield "" if number else "heads", f"{name:6}{head['kind']}, {head['parameters']:,} weights"


def _numbers(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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


def _trajectories(found: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, str]]:
    if not found:
        yield "optimal times", "none; optcov trajectory finds them"
    for number, (name, lengths) in enumerate(found.items()):
        some = f"{min(lengths)} to {max(lengths)}"
        whole = len(lengths) == max(lengths) - min(lengths) + 1
        steps = some if whole else f"{len(lengths)} lengths from {some}"
        yield "" if number else "optimal times", f"{name}: {steps} steps"


def _calibration(record: Any) -> Iterator[tuple[str, str]]:
    """Predicted over measured by time; a history is anybody's JSON, so that what does not fit is left out."""
    if not isinstance(record, Mapping) or not record:
        return
    yield "calibration", "of heads: predicted / measured on held-out images, by time; 1 is perfect"
    for name, entry in record.items():
        ratios = entry.get("ratio") if isinstance(entry, Mapping) else None
        if isinstance(ratios, list) and all(isinstance(ratio, int | float) for ratio in ratios):
            yield "", f"{name:5}" + "".join(f"{ratio:5.2f}" for ratio in ratios)


def pairs(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Each value after its name; nested names are joined, long values shortened."""
    for name, value in values.items():
        words = f"{prefix}{name.replace('_', ' ')}"
        if name in HOUSEKEEPING:
            continue
        if isinstance(value, Mapping):
            yield from pairs(value, f"{words} ")
        else:
            text = f"{value:g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
            yield f"{words} {text if len(text) <= 40 else f'{text[:16]}...'}"


def joined(parts: Any) -> str:
    """Parts of a line, with commas between them."""
    return ", ".join(parts)


def _by_part(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the directories and files right below the bundle."""
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.split("/")[0]
        parts[top] = parts.get(top, 0) + size
    return parts


def size_text(size: int) -> str:
    """A number of bytes for the eye."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
