"""optcov in diffusers' pipelines: a scheduler, a U-Net with a head, and `attach` to put both into a pipeline.

Importing this module is also what lets `from_pretrained` load pipelines that were saved with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optcov.bundle import Bundle, schedule_spec
from optcov.checkpoints.pipelines import DECODERS
from optcov.covariances import BothUnits, PerTime, find_covariance, number_at
from optcov.integrations.scheduler import OptimalCovarianceScheduler, OptimalCovarianceSchedulerOutput
from optcov.integrations.unet import UNETS, UNetWithHead
from optcov.methods import DEFAULT_METHOD, Method, find_method
from optcov.schedule import Schedule
from optcov.solvers.peers import clip_options

__all__ = ["OptimalCovarianceScheduler", "OptimalCovarianceSchedulerOutput", "UNetWithHead", "attach"]

TRAJECTORIES = ("even", "optimal")


def attach(
    pipeline: Any,
    bundle: Bundle,
    method: str = DEFAULT_METHOD,
    trajectory: str = "even",
    paper_exact: bool = False,
) -> Any:
    """Make a pipeline (DDPMPipeline, DDIMPipeline, ...) sample by a method of METHODS, and return it.

    Its network and its scheduler become the bundle's, which must take the same images. trajectory: "even", or "optimal"
    to visit the bundle's optimal times where it has as many steps as asked for. A bundle in continuous time runs on the
    linear schedule of 1,000 steps, by equal noise levels. paper_exact: clip x0_hat as the paper does, and not as is
    chosen for images (docs/clipping.md).
    """
    if not isinstance(bundle, Bundle):
        raise ValueError(f"bundle = {bundle!r:.80} is not a Bundle; pass what optcov.load or optcov.fit returns")
    if trajectory not in TRAJECTORIES:
        raise ValueError(f"trajectory = {trajectory!r} is not one of {', '.join(TRAJECTORIES)}")
    row = find_method(method)
    if not bundle.schedule.discrete:
        bundle = bundle.with_schedule(Schedule.linear())
    bundle.reverse_process(row)  # refuses solvers, methods of continuous time, and missing heads or numbers
    _check_pipeline(pipeline, bundle)
    scheduler = _scheduler(bundle, row, trajectory, paper_exact)
    unet = _network(bundle, row).to(pipeline.device)
    pipeline.register_modules(unet=unet, scheduler=scheduler)
    return pipeline


def _check_pipeline(pipeline: Any, bundle: Bundle) -> None:
    """Refuse a pipeline whose network takes other images, or more than an image and a time."""
    kind, unet = type(pipeline).__name__, getattr(pipeline, "unet", None)
    if unet is None:
        raise ValueError(f"{kind} has no unet to replace; give a pipeline such as DDPMPipeline or DDIMPipeline")
    decoder = next((name for name in DECODERS if getattr(pipeline, name, None) is not None), None)
    if decoder is not None and bundle.data_range is not None:
        raise ValueError(
            f"{kind} draws latents, which its {decoder} decodes, but {bundle.name} draws images in "
            f"{list(bundle.data_range)}; give a pipeline of images such as DDPMPipeline"
        )
    known: Any = (*UNETS.values(), UNetWithHead)
    if not isinstance(unet, known):
        raise ValueError(
            f"{kind} has a {type(unet).__name__}, not an unconditional UNet2DModel as in {bundle.name}; for others see "
            f"OptimalCovarianceScheduler, which needs no change of the network"
        )
    config = unet.config
    if config.get("class_embed_type") is not None or config.get("num_class_embeds") is not None:
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


def _scheduler(bundle: Bundle, row: Method, trajectory: str, paper_exact: bool) -> OptimalCovarianceScheduler:
    schedule = bundle.schedule
    assert row.covariance is not None
    options: dict[str, Any] = row.clipping(paper_exact)
    kind = find_covariance(row.covariance)
    if kind.head in bundle.heads:
        head = bundle.heads[kind.head]
        options |= {"head_unit": head.unit, "head_about": head.about}
    if kind.number is not None:
        numbers = bundle.per_time(kind.number)
        options[kind.number] = _at_all_times(numbers, schedule)
        if isinstance(numbers, BothUnits):
            options["velocity_numbers"] = _at_all_times(numbers.velocity, schedule)
    if trajectory == "optimal":
        options["trajectories"] = _trajectories(bundle, row)
    scheduler: OptimalCovarianceScheduler = OptimalCovarianceScheduler(
        num_train_timesteps=len(schedule.betas),
        trained_betas=schedule.betas.tolist(),
        prediction_type=bundle.network.parameterisation,
        covariance=row.covariance,
        eta=row.eta,
        noise_cap=bundle.noise_cap(row.name),
        **clip_options(bundle.data_range),
        **options,
    )
    return scheduler


def _at_all_times(numbers: PerTime, schedule: Schedule) -> list[float]:
    values: list[float] = number_at(numbers, schedule.full_grid()).tolist()
    return [values[0], *values]  # the one at time 0 is not used


def _trajectories(bundle: Bundle, row: Method) -> dict[str, list[int]]:
    here = schedule_spec(bundle.schedule)
    stored = [e for e in bundle.trajectories if e.method == row.name and schedule_spec(e.schedule) == here]
    if not stored:
        raise ValueError(f"{bundle.name} has no optimal trajectories for {row.name!r}; find them by optcov trajectory")
    return {str(len(e.trajectory)): [int(t) for t in e.trajectory.times] for e in stored}


def _network(bundle: Bundle, row: Method) -> nn.Module:
    """The bundle's U-Net as it is, if it needs neither a head nor other times than diffusers'."""
    network = bundle.network
    needed = find_covariance(row.covariance or "").head
    head = None if needed is None or (needed == "range" and network.learned_range) else bundle.heads[needed]
    times = bundle.schedule.full_grid()
    arguments = network.arguments(times)
    own = torch.equal(arguments, torch.arange(len(arguments), dtype=torch.float32))
    if head is None and own:
        return bundle.unet
    wrapped: nn.Module = UNetWithHead.wrap(
        bundle.unet,
        head,
        None if own else arguments.tolist(),
        bundle.schedule.log_snr(times).tolist(),
        network.parameterisation,
    )
    return wrapped
