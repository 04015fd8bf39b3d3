"""Save a bundle as a directory.

config.json               what the weights mean: schedule, time argument, image shape, data range, noise caps
unet/                     the noise predictor, in diffusers' format; missing for a module of your own
vae/                      what turns latents into images and back, for models of latents
heads/NAME.safetensors    each head, with the fingerprint of the backbone that it was fitted on
conditions.safetensors    what stands for no condition, if the network takes one
numbers.safetensors       Gamma_t and the mean square residual at some times
spectra.safetensors       powers of residuals per frequency at some times
matched.safetensors       matched noise of few-step trajectories
trajectories.json         optimal trajectories, by schedule and method
provenance.json           data, code, seeds, hyper-parameters, measured calibration
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optcov import storage
from optcov.bundle import matched
from optcov.bundle.config import BundleConfig
from optcov.bundle.directory import atomic_directory, check_path, check_replaceable
from optcov.bundle.errors import BundleError
from optcov.bundle.weights import (
    can_store,
    check_images,
    check_unet,
    half_precision,
    save_decoder,
    save_head,
    save_unet,
)
from optcov.networks import fingerprint

if TYPE_CHECKING:
    from optcov.bundle.bundle import Bundle

CONFIG, UNET, HEADS, NUMBERS = "config.json", "unet", "heads", "numbers.safetensors"
TRAJECTORIES, PROVENANCE, CONDITIONS = "trajectories.json", "provenance.json", "conditions.safetensors"
SPECTRA, MATCHED, DECODER = "spectra.safetensors", "matched.safetensors", "vae"
FILES = frozenset(
    {CONFIG, UNET, DECODER, HEADS, NUMBERS, SPECTRA, MATCHED, TRAJECTORIES, PROVENANCE, CONDITIONS, ".lock"}
)


def check_target(directory: str | Path) -> None:
    """Raise the error that `save` to this directory would."""
    check_replaceable(Path(directory), FILES)


def check_loadable(bundle: Bundle) -> None:
    """Raise the error that loading the saved bundle would."""
    try:
        config = BundleConfig.from_json(config_of(bundle).to_json())
        if config.given_network is not None:
            return
        check_unet(bundle.unet)
        check_images(bundle.unet, config.image_shape, config.learned_range, config.classes, bundle.empty_condition)
    except BundleError as error:
        raise BundleError(f"{bundle.name} would make a bundle that cannot be loaded: {error}") from error


def save(bundle: Bundle, directory: str | Path) -> None:
    """Write the bundle, whole or not at all, also in the place of an older one."""
    check_path(directory)
    bundle.check_loadable()
    if fingerprint(bundle.unet) != bundle.fingerprint:
        raise BundleError(
            f"{bundle.name}: the weights of the noise predictor changed since the bundle was made, so its "
            f"heads and numbers no longer belong to it; make a new bundle from the changed network"
        )
    with atomic_directory(Path(directory), FILES) as scratch:
        storage.write_json(scratch / CONFIG, config_of(bundle).to_json())
        if can_store(bundle.unet):
            save_unet(scratch / UNET, bundle.unet)
        if bundle.decoder is not None:
            save_decoder(scratch / DECODER, bundle.decoder)
        for name, head in bundle.heads.items():
            save_head(scratch / HEADS / f"{name}.safetensors", head, bundle.fingerprint)
        if bundle.numbers is not None:
            storage.write_tensors(scratch / NUMBERS, bundle.numbers.tensors())
        if bundle.spectra is not None:
            storage.write_tensors(scratch / SPECTRA, bundle.spectra.tensors())
        if bundle.empty_condition:
            storage.write_tensors(scratch / CONDITIONS, bundle.empty_condition)
        if bundle.matched:
            storage.write_tensors(scratch / MATCHED, *matched.to_file(bundle.matched))
        storage.write_json(scratch / TRAJECTORIES, [entry.to_json() for entry in bundle.trajectories])
        storage.write_json(scratch / PROVENANCE, dict(bundle.provenance))


def config_of(bundle: Bundle) -> BundleConfig:
    """What the weights mean."""
    network = bundle.network
    return BundleConfig(
        schedule=network.native_schedule,
        time_argument=network.time_argument,
        image_shape=bundle.image_shape,
        parameterisation=network.parameterisation,
        learned_range=network.learned_range,
        data_range=bundle.data_range,
        heads=tuple(network.heads),
        noise_caps=bundle.noise_caps,
        classes=bundle.classes,
        empty_condition=tuple(bundle.empty_condition),
        decoder=bundle.decoder is not None,
        precision=half_precision(bundle.unet),
        given_network=_given_network(bundle),
    )


def _given_network(bundle: Bundle) -> dict[str, str] | None:
    """How a network is known again that a bundle cannot hold."""
    if can_store(bundle.unet):
        return None
    layer = bundle.network.backbone.layer or ""
    return {"class": type(bundle.unet).__name__, "layer": layer, "weights": bundle.fingerprint}
