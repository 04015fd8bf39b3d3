"""A bundle from a foreign model that `optcov.checkpoints` has imported."""

from __future__ import annotations

from typing import Any

from optcov.bundle.bundle import Bundle
from optcov.bundle.numbers import NumbersPerTime
from optcov.checkpoints import ImportedModel
from optcov.networks import Backbone, HeadedNetwork


def bundle_of(model: ImportedModel) -> Bundle:
    """Everything that the foreign files said, and the paper's settings for them."""
    network = HeadedNetwork(
        Backbone.unet(model.unet),
        model.schedule,
        model.heads,
        model.time_argument,
        model.parameterisation,
        model.learned_range,
    )
    imported: dict[str, Any] = {"source": model.source, "trajectory": "even"}
    if model.left_out:
        imported["left_out"] = list(model.left_out)
    bundle = Bundle(
        network=network.eval().requires_grad_(False),
        image_shape=model.image_shape,
        name=model.source,
        noise_caps=model.noise_caps,
        provenance={"imported": imported},
    )
    if model.mean_square_noise is None:
        return bundle
    return bundle.with_numbers(NumbersPerTime(model.gamma_times, model.mean_square_noise))
