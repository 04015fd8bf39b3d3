"""optcov in diffusers pipelines: schedulers, networks with a head, and `attach`, which puts both into a pipeline.

Import this module before `from_pretrained` loads a pipeline that was saved with these schedulers or networks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from optcov.bundle import Bundle
from optcov.checkpoints.diffusers_models import LATENT_PARTS
from optcov.checkpoints.families import FAMILIES
from optcov.covariances import find_covariance
from optcov.integrations.flow_scheduler import FlowMatchOptimalCovarianceScheduler
from optcov.integrations.latents import attach_to_latents, discrete_scheduler
from optcov.integrations.multistep import BridgeScheduler, FlowMatchBridgeScheduler, MatchedScheduler, MultistepOutput
from optcov.integrations.scheduler import OptimalCovarianceScheduler
from optcov.integrations.stepping import OptimalCovarianceSchedulerOutput
from optcov.integrations.unet import UNETS, UNetWithHead
from optcov.methods import HEAD_METHOD, Method, find_method
from optcov.networks.classes import LABELS
from optcov.schedule import Schedule
from optcov.solvers.peers import clip_options

__all__ = [
    "BridgeScheduler",
    "FlowMatchBridgeScheduler",
    "FlowMatchOptimalCovarianceScheduler",
    "MatchedScheduler",
    "MultistepOutput",
    "OptimalCovarianceScheduler",
    "OptimalCovarianceSchedulerOutput",
    "UNetWithHead",
    "attach",
]

TRAJECTORIES = ("even", "optimal")
FEW_STEPS = ("bridge", "matched")  # solvers with a scheduler of their own


def attach(
    pipeline: Any,
    bundle: Bundle,
    method: str = HEAD_METHOD,
    trajectory: str = "even",
    clip_mean: bool = True,
    label: int | None = None,
) -> Any:
    """Make a pipeline sample by a method, and return it. You call it as before.

    The pipeline gets the bundle's network and a scheduler of the method. Pipeline and bundle must take the same data.
    If a pipeline of latents already has a network with the same weights, that network stays, and gets the head.
    method: "Bridge 2M", "Matched 2M", or a method of METHODS with a covariance in discrete time and without a spectrum.
    trajectory: "even", or "optimal". "optimal" visits the bundle's optimal times if the bundle has them for the number
    of steps that you ask for. Models of flow matching visit the times of their own scheduler. Bridge 2M has its own
    times. Matched 2M visits the times of the bundle's matched noise.
    clip_mean: False clips x0_hat in the last step only (docs/clipping.md).
    label: the class to draw, for a bundle with classes in a pipeline that takes none, such as DDPMPipeline. By default
    the class that stands for no class.

    A bundle of images in continuous time runs on the linear schedule of 1,000 steps, at equal noise levels.
    """
    if not isinstance(bundle, Bundle):
        raise ValueError(f"bundle = {bundle!r:.80} is not a Bundle; pass what optcov.load or optcov.fit returns")
    if trajectory not in TRAJECTORIES:
        raise ValueError(f"trajectory = {trajectory!r} is not one of {', '.join(TRAJECTORIES)}")
    row = find_method(method)
    if row.covariance is not None and find_covariance(row.covariance).spectrum is not None:
        raise ValueError(
            f"{row.name} correlates pixels by a spectrum, which a scheduler's config cannot hold; sample by "
            f"bundle.sample(n, method={row.name!r}), or attach a method such as {HEAD_METHOD}"
        )
    if row.solver in FEW_STEPS and (trajectory, clip_mean) != ("even", True):
        raise ValueError(
            f"{row.name} has times of its own and clips the last step alone; leave trajectory and clip_mean out, or "
            f"attach a method such as {HEAD_METHOD}"
        )
    family = FAMILIES.get(type(pipeline).__name__)
    if family is not None and family.decoder is not None:
        if label is not None:
            raise ValueError(f"label = {label!r} is for pipelines of images; tell {type(pipeline).__name__} the class")
        if not clip_mean:
            raise ValueError("clip_mean = False is for images; latents have no range to clip to, so leave it out")
        if row.solver == "matched":
            raise ValueError(
                f"{row.name} has no scheduler for pipelines of latents; attach Bridge 2M, or sample by "
                f"bundle.sample(n, method={row.name!r})"
            )
        return attach_to_latents(pipeline, family, bundle, row, trajectory)
    if not bundle.schedule.discrete:
        bundle = bundle.with_schedule(Schedule.linear())
    if row.solver not in FEW_STEPS:
        bundle.reverse_process(row)  # refuses solvers, methods of continuous time, and missing heads or numbers
    _check_pipeline(pipeline, bundle)
    label = _class_label(bundle, label)
    scheduler: Any = (
        _few_step_scheduler(bundle, row)
        if row.solver in FEW_STEPS
        else discrete_scheduler(bundle, row, trajectory, clip_mean=clip_mean)
    )
    if _differ(pipeline.unet, bundle.unet):
        logging.getLogger(__name__).warning(
            f"the pipeline's network has other weights than that of {bundle.name}, which takes its place; to keep it, "
            f"fit the pipeline"
        )
    unet = _network(bundle, row, label).to(pipeline.device)
    pipeline.register_modules(unet=unet, scheduler=scheduler)
    return pipeline


def _check_pipeline(pipeline: Any, bundle: Bundle) -> None:
    """Refuse a pipeline whose network takes other images, or more than an image and a time."""
    kind, unet = type(pipeline).__name__, getattr(pipeline, "unet", None)
    if unet is None:
        raise ValueError(f"{kind} has no unet to replace; give a pipeline such as DDPMPipeline or DDIMPipeline")
    decoder = next((name for name in LATENT_PARTS if getattr(pipeline, name, None) is not None), None)
    if decoder is not None and bundle.data_range is not None:
        raise ValueError(
            f"{kind} draws latents, which its {decoder} decodes, but {bundle.name} draws images in "
            f"{list(bundle.data_range)}; give a pipeline of images such as DDPMPipeline"
        )
    if not isinstance(bundle.unet, tuple(UNETS.values())):
        raise ValueError(
            f"{bundle.name} holds a {type(bundle.unet).__name__}, which {kind} cannot call; sample by "
            f"bundle.sample(n, labels=...)"
        )
    unet = getattr(unet, "_orig_mod", unet)  # of a network that torch.compile made
    known: Any = (*UNETS.values(), UNetWithHead)
    if not isinstance(unet, known):
        raise ValueError(
            f"{kind} has a {type(unet).__name__}, not an unconditional UNet2DModel as in {bundle.name}; for others see "
            f"OptimalCovarianceScheduler, which needs no change of the network"
        )
    config = unet.config
    if bundle.classes is None and (config.get("class_embed_type") or config.get("num_class_embeds")):
        raise ValueError(f"the network of this {kind} is conditional on a class, but the bundle's is not")
    channels, *sides = bundle.image_shape
    if config["in_channels"] != channels:
        raise ValueError(
            f"the network of this {kind} takes images of {config['in_channels']} channels, but the bundle's takes "
            f"images of {channels}"
        )
    size = config["sample_size"]
    found = [size, size] if isinstance(size, int) else sides if size is None else list(size)
    if found != sides:
        raise ValueError(
            f"the network of this {kind} takes images of {' x '.join(map(str, found))} pixels, but the bundle's takes "
            f"{' x '.join(map(str, sides))}"
        )


def _class_label(bundle: Bundle, label: int | None) -> int | None:
    """The class of every image that the pipeline draws; None for a bundle without classes."""
    empty = bundle.empty_condition.get(LABELS)
    if bundle.classes is None:
        if label is not None:
            raise ValueError(f"label = {label!r}, but {bundle.name} knows no classes; leave it out")
        return None
    if label is None and empty is None:
        raise ValueError(
            f"{bundle.name} knows {bundle.classes} classes and none that stands for no class; pass one, as label=0"
        )
    if label is not None and (isinstance(label, bool) or label not in bundle.class_numbers):
        raise ValueError(
            f"label = {label!r} is no class of {bundle.name}; choose {bundle.class_numbers[0]} to "
            f"{bundle.class_numbers[-1]}, or leave it out for images of any class"
        )
    return int(label if label is not None else empty)  # type: ignore[arg-type]


def _differ(network: nn.Module, other: nn.Module) -> bool:
    """Whether weights differ by more than their rounding to float16."""
    network = getattr(network, "_orig_mod", network)
    network = network.backbone.module if isinstance(network, UNetWithHead) else network
    own, known = network.state_dict(), other.state_dict()
    return own.keys() != known.keys() or any(
        not torch.allclose(weight.float().cpu(), known[name].float().cpu(), rtol=1e-3, atol=1e-6)
        for name, weight in own.items()
    )


def _few_step_scheduler(bundle: Bundle, row: Method) -> Any:
    told: dict[str, Any] = {
        "num_train_timesteps": len(bundle.schedule.betas),
        "trained_betas": bundle.schedule.betas.tolist(),
        "prediction_type": bundle.network.parameterisation,
    }
    if row.solver == "bridge":
        shape = list(bundle.image_shape)
        return BridgeScheduler(**told, **clip_options(bundle.data_range), bridge_image_shape=shape)
    matched = MatchedScheduler(**told, data_range=None if bundle.data_range is None else list(bundle.data_range))
    matched.use(bundle.matched)
    return matched


def _network(bundle: Bundle, row: Method, label: int | None) -> nn.Module:
    """The bundle's U-Net as it is, if it needs neither a head, a class nor other times and noise than diffusers'."""
    network = bundle.network
    needed = None if row.covariance is None else find_covariance(row.covariance).head
    head = None if needed is None or needed in network.output_heads else bundle.heads[needed]
    times = bundle.schedule.full_grid()
    arguments = network.arguments(times)
    own, scales = torch.equal(arguments, torch.arange(len(arguments), dtype=torch.float32)), network.input_scale(times)
    if head is None and own and label is None and scales is None:
        return bundle.unet
    wrapped: nn.Module = UNetWithHead.wrap(
        bundle.unet,
        head,
        None if own else arguments.tolist(),
        bundle.schedule.log_snr(times).tolist(),
        network.parameterisation,
        label,
        None if scales is None else scales.tolist(),
    )
    return wrapped
