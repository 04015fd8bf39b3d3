"""Networks: a backbone with tapped features, heads on them, and the times they were trained on."""

from optcov.networks.backbone import Backbone, BackboneOutput, fingerprint
from optcov.networks.form import Form
from optcov.networks.heads import ConvHead, DenseHead, Head, ResidualHead, TimedHead, build_head, head_config
from optcov.networks.network import HeadedNetwork
from optcov.networks.taps import Tap, tap_of
from optcov.networks.times import TimeArgument, TimeMatch

__all__ = [
    "Backbone",
    "BackboneOutput",
    "ConvHead",
    "DenseHead",
    "Form",
    "Head",
    "HeadedNetwork",
    "ResidualHead",
    "Tap",
    "TimeArgument",
    "TimeMatch",
    "TimedHead",
    "build_head",
    "fingerprint",
    "head_config",
    "tap_of",
]
