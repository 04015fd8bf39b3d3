"""The authors' NPR and SN heads: from a file with trunk and head together, into ConvHead and ResidualHead.

Both end linearly. The keys say whether a head has a residual block, but not what it estimates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optcov.checkpoints.architecture import Family
from optcov.checkpoints.errors import CheckpointError
from optcov.checkpoints.layout import State, Table, export_state, import_state
from optcov.checkpoints.sources import Source
from optcov.networks import Head, build_head

KINDS = ("npr", "sn")


def keys(family: Family) -> set[str]:
    """All keys that only a head has."""
    return {entry.foreign for table in (family.conv_head, family.residual_head) for entry in table}


def split(family: Family, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The keys of the trunk, and those that only a head has."""
    own = keys(family)
    head = {key: value for key, value in state.items() if key in own}
    return {key: value for key, value in state.items() if key not in own}, head


def structure(family: Family, head: State) -> str:
    """Whether the keys are those of a "conv" or of a "residual" head."""
    only_residual = {e.foreign for e in family.residual_head} - {e.foreign for e in family.conv_head}
    return "residual" if any(key in only_residual for key in head) else "conv"


def which(source: Source, found: str, asked: str | None, file_name: str = "") -> str:
    """Whether a head is "npr" or "sn": as asked, by its structure where the two differ, or by the file name.

    A name tells only by a word of its own, as in sn.pth or cifar10_ls-npr.pth.
    """
    if asked is not None:
        if asked not in KINDS:
            raise CheckpointError(f"unknown head {asked!r}; choose one of {', '.join(KINDS)}")
        return asked
    if source.sn_head == "residual":  # then the two heads differ in structure
        return "sn" if found == "residual" else "npr"
    told = set(re.split(r"[^a-z0-9]+", file_name.lower())) & set(KINDS)
    if len(told) == 1:
        return told.pop()
    raise CheckpointError("it holds a head too, and its keys do not say which one; add --head npr or --head sn")


def import_head(family: Family, state: State, unet: Any, channels: int) -> Head:
    """Build the head that the keys describe, for images of so many channels."""
    kind = structure(family, state)
    head = empty_head(family, kind, unet.config, channels)
    weights = import_state(_table(family, kind), state, head.state_dict())
    head.load_state_dict(weights, assign=True)
    return head.eval()


def export_head(family: Family, head: Head) -> dict[str, Tensor]:
    """A head's weights by the authors' keys; the inverse of `import_head`."""
    if head.kind not in ("conv", "residual") or not _table(family, head.kind):
        raise CheckpointError(f"{family.name} has no keys for a head of kind {head.kind!r}")
    if head.transform != "linear":
        raise CheckpointError(
            f"the authors' heads end linearly, but this one ends by {head.transform!r}; "
            'fit it with loss="mse" to export it'
        )
    return export_state(_table(family, head.kind), head.state_dict())


def _table(family: Family, kind: str) -> Table:
    return family.residual_head if kind == "residual" else family.conv_head


def empty_head(family: Family, kind: str, unet_config: Any, channels: int) -> Head:
    """A head of the authors' structure without weights, for a network with this config."""
    width = unet_config["block_out_channels"][0]
    per_group = unet_config["channels_per_group"]
    options: dict[str, Any] = {
        "kind": kind,
        "in_channels": width,
        "out_channels": channels,
        "groups": min(width // per_group, 32) if per_group else 32,
        "eps": family.head_config["eps"],
        "transform": "linear",
    }
    if kind == "residual":
        options |= {"time_channels": 4 * width, "scale_shift": family.head_config.get("scale_shift", False)}
    try:
        with torch.device("meta"):
            return build_head(options)
    except (ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"no head has the structure that its keys describe ({error})") from error


def check_trunks_agree(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Refuse a head that was trained on another network.

    The averaged weights of a frozen network drift by rounding while its head is trained, so nearly equal will
    do.
    """
    for key, values in first.items():
        if key in second and not torch.allclose(values.float(), second[key].float(), rtol=1e-2, atol=1e-3):
            raise CheckpointError(f"its head belongs to another network: {key} differs")
