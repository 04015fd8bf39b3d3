"""Heads: small modules that read a backbone's features and estimate a second moment of the noise (Eq. 17).

    conv       out(conv3x3(SiLU(norm(h))))
    residual   conv after a residual block, which also sees the time embedding
    timed      conv with weights by noise level, relative to the level's mean target: the default of `optcov fit`;
               `optcov fit --kind deep` puts two hidden layers before the convolution
    dense      out(linear(SiLU(...SiLU(linear(SiLU(norm(h))))))) for features without pixels

Here h is the features and `out` is the output transform. "exp" is positive, as second moments are. "linear" is the
paper's, and that of the learned range. The last layer starts at zero, so a fresh head returns out(0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optcov.networks.heads.base import ConvHead, DenseHead, Head
from optcov.networks.heads.residual import ResidualHead
from optcov.networks.heads.timed import TimedHead
from optcov.prediction import UNITS

HEADS: dict[str, type[Head]] = {"conv": ConvHead, "residual": ResidualHead, "dense": DenseHead, "timed": TimedHead}


def build_head(config: Mapping[str, Any]) -> Head:
    """Build a head from the result of `head_config`; the weights are loaded separately."""
    options = dict(config)
    kind, unit, about = options.pop("kind", None), options.pop("unit", "noise"), options.pop("about", "zero")
    if kind not in HEADS:
        raise ValueError(f"unknown kind of head {kind!r}; choose one of {', '.join(HEADS)}")
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r} of a head; choose one of {', '.join(UNITS)}")
    if about not in ("zero", "prediction"):
        raise ValueError(f"a head is about zero or about the prediction, not about {str(about)[:50]!r}")
    try:
        head = HEADS[kind](**options)
    except TypeError as error:
        raise ValueError(f"the options {options} do not fit a head of kind {kind!r}: {error}") from error
    head.unit, head.about = unit, about
    return head


def head_config(head: Head) -> dict[str, Any]:
    """Everything that `build_head` needs, as plain JSON values."""
    told = {"unit": head.unit, "about": head.about}
    usual = {"unit": "noise", "about": "zero"}  # as before there were others
    return {"kind": head.kind, **head.config, **{name: v for name, v in told.items() if v != usual[name]}}


__all__ = ["HEADS", "ConvHead", "DenseHead", "Head", "ResidualHead", "TimedHead", "build_head", "head_config"]
