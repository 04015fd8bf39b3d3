"""`attach` for pipelines whose images are latents: DiT, Stable Diffusion, PixArt, SD3, Flux, LDM."""

from __future__ import annotations

import uuid
from typing import Any

from torch import nn

from optcov.bundle import Bundle, schedule_spec
from optcov.bundle.numbers import IN_VELOCITY
from optcov.checkpoints.families import Family
from optcov.covariances import BothUnits, PerTime, find_covariance, number_at
from optcov.integrations.flow_scheduler import FlowMatchOptimalCovarianceScheduler
from optcov.integrations.headed_models import unwrap, wrap
from optcov.integrations.multistep import BridgeScheduler, FlowMatchBridgeScheduler
from optcov.integrations.scheduler import OptimalCovarianceScheduler
from optcov.methods import Method
from optcov.networks import fingerprint
from optcov.networks.calls import example_of, image_channels
from optcov.schedule import Schedule
from optcov.solvers.peers import clip_options

# what a scheduler cannot say of itself, by the part of a pipeline that it is in
FIRST_HALF = ("DiTPipeline",)  # pipelines that put the conditional half of a guided batch first


def attach_to_latents(pipeline: Any, family: Family, bundle: Bundle, row: Method, trajectory: str) -> Any:
    """Put a network with its head and a scheduler of the method into a pipeline."""
    network = _matching(pipeline, family, bundle)
    if row.solver == "bridge":
        pipeline.register_modules(**{family.network: network, "scheduler": _bridge_scheduler(pipeline, bundle)})
        return pipeline
    bundle.reverse_process(row)  # refuses solvers, methods of continuous time, and missing heads or numbers
    kind = find_covariance(row.covariance or "")
    needs_head = kind.head is not None
    half = "first" if type(pipeline).__name__ in FIRST_HALF else "second"
    told: dict[str, Any] = {"link": uuid.uuid4().hex if needs_head else None, "guided_half": half}
    head = None if kind.head in bundle.network.output_heads else bundle.heads.get(kind.head or "")
    # a moment about zero becomes a variance by the prediction that it belongs to, which guidance moves afterwards
    less_square = head is not None and kind.about == "prediction" and head.about == "zero"
    if less_square:
        told["head_about"] = "prediction"
    if bundle.schedule.discrete:
        scheduler: Any = discrete_scheduler(bundle, row, trajectory, **told)
    elif schedule_spec(bundle.schedule) == {"kind": "flow"}:
        if trajectory != "even":
            raise ValueError("models of flow matching visit the times of their own scheduler; leave trajectory out")
        scheduler = _flow_scheduler(pipeline, bundle, row, told)
    else:
        raise ValueError(f"{bundle.name} has the schedule {bundle.schedule!r}, which no pipeline of latents has")
    if needs_head:
        argument = bundle.network.time_argument
        settings = {
            "link": told["link"],
            "schedule": schedule_spec(bundle.schedule),
            "parameterisation": bundle.network.parameterisation,
            "scale": argument.scale,
            "shift": argument.shift,
            "range": bundle.network.learned_range,
            **({"less_square": True} if less_square else {}),
        }
        device = next(network.parameters()).device
        network = wrap(network, None if head is None else head.to(device), settings)
    pipeline.register_modules(**{family.network: network, "scheduler": scheduler})
    return pipeline


def _matching(pipeline: Any, family: Family, bundle: Bundle) -> nn.Module:
    """The pipeline's own network if its weights are the bundle's, else the bundle's; another kind is refused."""
    kind, own = type(pipeline).__name__, getattr(pipeline, family.network, None)
    if own is None:
        raise ValueError(f"this {kind} has no {family.network} to replace; load the whole pipeline")
    own = unwrap(getattr(own, "_orig_mod", own))
    theirs, ours = type(own).__name__, type(bundle.unet).__name__
    if theirs != ours:
        raise ValueError(f"the network of this {kind} is a {theirs}, but that of {bundle.name} is a {ours}")
    if bundle.data_range is not None or image_channels(own) != image_channels(bundle.unet):
        raise ValueError(
            f"{kind} draws latents of {image_channels(own)[0]} channels, which its {family.decoder} decodes, but "
            f"{bundle.name} draws {'images' if bundle.data_range else 'latents'} of {bundle.image_shape[0]} channels; "
            f"give the pipeline that it was fitted on"
        )
    taken = [
        {name: value.shape[-1] if value.ndim > 1 else 1 for name, value in example_of(each).items()}
        for each in (own, bundle.unet)
    ]
    if taken[0] != taken[1]:
        theirs, ours = (", ".join(f"{name} of {width}" for name, width in each.items()) for each in taken)
        raise ValueError(
            f"the network of this {kind} is told {theirs}, but that of {bundle.name} {ours}; give the pipeline that it "
            f"was fitted on"
        )
    if bundle.schedule is not bundle.network.native_schedule:
        raise ValueError(f"{bundle.name} is on another schedule than its network's own; load it without schedule=")
    if fingerprint(own) == bundle.fingerprint:
        return own
    weight = next(own.parameters())
    return bundle.unet.to(weight.device)


def _bridge_scheduler(pipeline: Any, bundle: Bundle) -> Any:
    """Bridge 2M with the settings of the pipeline's own scheduler."""
    if bundle.schedule.discrete:
        told = {"prediction_type": bundle.network.parameterisation, "bridge_image_shape": list(bundle.image_shape)}
        return BridgeScheduler.from_config(pipeline.scheduler.config, **told)
    return FlowMatchBridgeScheduler.from_config(pipeline.scheduler.config, **_flow_shift(pipeline))


def _flow_shift(pipeline: Any) -> dict[str, float]:
    """The shift of times, where a scheduler such as UniPC calls it otherwise."""
    theirs = pipeline.scheduler.config
    if "shift" not in theirs and theirs.get("flow_shift") is not None:
        return {"shift": theirs["flow_shift"]}
    return {}


def _flow_scheduler(pipeline: Any, bundle: Bundle, row: Method, told: dict[str, Any]) -> Any:
    """The pipeline's own times, shifts included, with the steps of a method."""
    kind = find_covariance(row.covariance or "")
    options: dict[str, Any] = {"prediction_type": bundle.network.parameterisation}
    if kind.head in bundle.heads:
        options |= {"head_unit": bundle.heads[kind.head].unit, "head_about": bundle.heads[kind.head].about}
    options |= told
    numbers = None
    if kind.number is not None:
        assert bundle.numbers is not None
        tensors = bundle.numbers.tensors()
        wanted = ("times", "mean_square_noise", kind.number, IN_VELOCITY[kind.number])
        numbers = {name: tensors[name].tolist() for name in dict.fromkeys(wanted) if name in tensors}
    options |= _flow_shift(pipeline)
    return FlowMatchOptimalCovarianceScheduler.from_config(
        pipeline.scheduler.config, covariance=row.covariance, eta=row.eta, numbers=numbers, **options
    )


def discrete_scheduler(bundle: Bundle, row: Method, trajectory: str, **others: Any) -> OptimalCovarianceScheduler:
    """The scheduler of a method on the bundle's discrete schedule. others: further settings of it."""
    schedule = bundle.schedule
    assert row.covariance is not None
    options: dict[str, Any] = {}
    kind = find_covariance(row.covariance)
    if kind.head in bundle.heads:
        head = bundle.heads[kind.head]
        options |= {"head_unit": head.unit, "head_about": head.about}
    options |= others
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
