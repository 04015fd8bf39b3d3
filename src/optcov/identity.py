"""What kept numbers belong to: digests of all that changes them, and in words what changed between two runs.

An identity is a mapping from names to plain JSON values. What is too large to be written down (images, weights, the
levels of a schedule) stands there as `known_by(digest, text)`: only the digest is compared, and only the text is shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optcov.storage import StorageError, read_json, write_json

Identity = Mapping[str, Any]

PRECISION = 30  # bits that count of a computed number: machines differ in the last of its 53
_BATCH = 1024  # images that are digested at once
_MISSING = object()
_PHRASES = {  # said instead of "the NAME changed"
    "weights": "the weights of the network changed",
    "network": "the settings of the network changed",
    "numbers": "the bundle was refitted: its numbers per time changed",
}
_NAMES = {"data": "images", "checksum": "images"}
_UNDO = "undo that to go on with it, or choose another directory"


def digest(content: Any) -> str:
    """SHA-256 of plain JSON values, in hexadecimal; of what is known by a digest, the text does not count."""
    text = json.dumps(_bare(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name, those of floating point as float32 or more, in hexadecimal.

    Weights stored in half precision and read back as float32 keep it, since that is exact.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu()
        values = values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values
        found.update(f"{name}{tuple(values.shape)}".encode())
        found.update(values.flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest_numbers(numbers: Tensor) -> str:
    """SHA-256 of computed numbers, without the last bits, in which machines differ."""
    mantissa, exponent = torch.frexp(numbers.detach().cpu().double())
    finite = mantissa.isfinite()
    whole = torch.where(finite, mantissa * 2**PRECISION, 0.0).round().long()
    kind = torch.where(finite, 0, torch.where(mantissa.isnan(), 1, torch.where(mantissa > 0, 2, 3)))
    return digest_tensors({"mantissa": whole, "exponent": exponent.long(), "kind": kind})


def known_by(found: str, text: object = "") -> dict[str, str]:
    """An entry for what is known by its digest; the text is for display."""
    return {"digest": found, "is": str(text)}


def images_identity(images: Any) -> dict[str, str]:
    """The entry for images: a tensor, or a source of batches with `x_0`, by all of their pixels."""
    checksum = getattr(images, "checksum", None)
    if not isinstance(checksum, str):
        starts = range(0, len(images), _BATCH)
        shares = [torch.arange(start, min(start + _BATCH, len(images))) for start in starts]
        taken = (images[share] if isinstance(images, Tensor) else images.x_0(share) for share in shares)
        checksum = digest([digest_tensors({"": part}) for part in taken])
    return known_by(checksum, len(images))


def condition_identity(condition: Mapping[str, Tensor] | None) -> dict[str, str] | None:
    """The entry for a condition: all of its tensors by name; None where there is none."""
    return known_by(digest_tensors(condition), ", ".join(sorted(condition))) if condition else None


def changes(before: Identity, now: Identity, ignore: Collection[str] = ()) -> list[str]:
    """What changed, a phrase for each entry that did; an entry that one side lacks counts as None there."""
    return [
        phrase
        for name in {**now, **before}
        if name not in ignore
        for phrase in _change(name, before.get(name, _MISSING), now.get(name))
    ]


def check_unchanged(
    before: Identity,
    now: Identity,
    where: object,
    error: Callable[[str], Exception] = ValueError,
    *,
    ignore: Collection[str] = (),
    remedy: str = _UNDO,
) -> None:
    """Refuse to go on with what belongs to another identity, by a sentence that says what changed."""
    changed = changes(before, now, ignore)
    if changed:
        more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise error(f"{where} belongs to another run: {', '.join(changed[:3])}{more}; {remedy}")


def remember(path: Path, identity: Identity, where: object, remedy: str = _UNDO, *, part: bool = False) -> None:
    """Keep an identity in a file beside what belongs to it, or refuse if another one is kept there.

    part: True if this identity is only a part of the file's. Entries that the file lacks are added, and its other
    entries stay.
    """
    before: Any = read_json(path) if path.exists() else {}
    if not isinstance(before, dict):
        raise StorageError(f"{path} does not describe a run; remove it, or choose another directory")
    if part:
        check_unchanged(before, {**before, **identity}, where, ignore=identity.keys() - before.keys(), remedy=remedy)
    elif before:
        check_unchanged(before, identity, where, remedy=remedy)
    if not identity.keys() <= before.keys():
        write_json(path, {**before, **identity})


def _change(name: str, before: Any, now: Any) -> Iterator[str]:
    if before is _MISSING and now is not None and _digest_of(now) is not None:
        yield f"nothing is known of its {_spoken(name)}"
        return
    before = None if before is _MISSING else before
    if _bare(before) == _bare(now):
        return
    if name == "heads" and isinstance(before, Mapping) and isinstance(now, Mapping):
        yield from _changed_heads(before, now)
    elif _digest_of(before) is None and isinstance(before, Mapping) and isinstance(now, Mapping):
        yield from (f"{phrase} (of its {_spoken(name)})" for phrase in changes(before, now, ("name",)))
    else:
        old, new = _text(before), _text(now)
        change = f" from {old} to {new}" if old != new and old and new else ""  # if both can be read and differ
        yield _PHRASES.get(name) or f"the {_spoken(name)} changed{change}"


def _changed_heads(before: Identity, now: Identity) -> Iterator[str]:
    for name in sorted({**before, **now}):
        if name not in now:
            yield f"its {name} head is gone"
        elif _bare(before.get(name)) != _bare(now[name]):
            yield f"the bundle was refitted: its {name} head {'changed' if name in before else 'is new'}"


def _spoken(name: str) -> str:
    return _NAMES.get(name, name).replace("_", " ")


def _text(value: Any) -> str:
    """A value for display; empty if it is too long to be read."""
    if _digest_of(value) is not None:
        return str(value.get("is", value.get("images", "")))
    if value is None:
        return "none"
    if isinstance(value, Mapping) or (isinstance(value, list | tuple) and len(value) > 6):
        return ""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"({text})" if isinstance(value, list | tuple) else text


def _digest_of(value: Any) -> str | None:
    """The digest of an entry that is known by one."""
    found = value.get("digest", value.get("checksum")) if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else None


def _bare(content: Any) -> Any:
    """As JSON gives it back, with the digest alone of what is known by one."""
    if (found := _digest_of(content)) is not None:
        return found
    if isinstance(content, Mapping):
        return {str(name): _bare(value) for name, value in content.items()}
    if isinstance(content, Iterable) and not isinstance(content, str):
        return [_bare(value) for value in content]
    return content
