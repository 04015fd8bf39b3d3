"""Import and export of whole checkpoints: weights, heads, schedule and settings of the paper's networks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.checkpoints import heads as head_files
from optcov.checkpoints.architecture import Architecture, Family, unet_config
from optcov.checkpoints.errors import CheckpointError, naming
from optcov.checkpoints.files import check_size, read_file, weights_file
from optcov.checkpoints.layout import State, check_keys, export_state, import_state
from optcov.checkpoints.sources import FAMILIES, Source, find_family, find_source
from optcov.checkpoints.wrappers import unwrap
from optcov.networks import Head, TimeArgument
from optcov.networks.unet_config import same_setting
from optcov.schedule import Schedule

# settings of a network that its authors' keys need not know
_FREE = frozenset({"sample_size", "dropout", "time_shift", "time_scale", "num_train_timesteps"})
_CONSTANTS = frozenset(name for family in FAMILIES for name in family.constants)
_HEADS = frozenset(key for family in FAMILIES for key in head_files.keys(family))


@final
@dataclass(frozen=True)
class ImportedModel:
    """A foreign model in the terms of this package."""

    unet: Any  # UNet2DModel or PaperUNet, eval mode; takes the network's own time argument
    schedule: Schedule  # the one it was trained on
    time_argument: TimeArgument
    image_shape: tuple[int, ...] | None  # (C, H, W); None: that of the data
    source: str  # a name in SOURCES, or what diffusers' files say of themselves
    heads: Mapping[str, Head] = field(default_factory=dict)  # "npr", "sn"
    learned_range: bool = False  # the output is noise and v, the "range" head of Improved DDPM
    parameterisation: str = "epsilon"
    mean_square_noise: Tensor | None = None  # Gamma at the times `gamma_times`, float64 (T,)
    noise_caps: Mapping[str, float | None] = field(default_factory=dict)  # the paper's y by method
    left_out: tuple[str, ...] = ()  # settings of the network's config that are off and that nobody here knows
    data_range: tuple[float, float] | None = (-1.0, 1.0)  # None: latents
    decoder: Any = None  # what turns latents into images and back
    words: Any = None  # what turns captions into a condition; None: it takes none
    empty_condition: Mapping[str, Tensor] = field(default_factory=dict)  # what stands for none, each (1, ...)
    any_size: bool = False  # takes data of other sizes than image_shape
    layer: str | None = None  # the output layer, of a module that does not tell

    @property
    def gamma_times(self) -> Tensor:
        """The times that `mean_square_noise` belongs to, float64 (T,)."""
        return self.schedule.full_grid().double()


def import_checkpoint(
    path: Path,
    name: str | None = None,
    *,
    head: str | None = None,
    npr: Path | None = None,
    sn: Path | None = None,
    gamma: Path | None = None,
    image_size: int | None = None,
) -> ImportedModel:
    """Import one of the paper's networks.

    name: which network it is, if its keys fit two.
    head: "npr" or "sn", if the file also holds a head and its keys fit both.
    npr, sn: other files that hold network and head together; only the head is used.
    gamma: the file with the authors' Gamma_t.
    image_size: height and width of the images. Needed if no level of the network has attention.
    """
    path = Path(path)
    with naming(path):
        family, state = read_state(path)
        trunk, head_state = head_files.split(family, state)
        plan = family.infer(trunk)
        source = find_source(family, plan, name)
        channels, size = plan.in_channels, _image_size(plan, image_size)
        unet = build_unet(family, plan, source, size, trunk)
        heads = {}
        if head_state:
            kind = head_files.which(source, head_files.structure(family, head_state), head, path.name)
            heads[kind] = head_files.import_head(family, head_state, unet, channels)
        elif head is not None:
            raise CheckpointError(f"--head {head} was given, but the file holds no head beside the network")
    for kind, file in (("npr", npr), ("sn", sn)):
        if file is not None:
            if kind in heads:
                raise CheckpointError(f"{path} holds a head {kind!r} already; leave --{kind} out")
            heads[kind] = _head_of_other_file(Path(file), family, trunk, unet, channels)
    return ImportedModel(
        unet=unet,
        schedule=source.schedule(),
        time_argument=source.time_argument,
        image_shape=(channels, size, size),
        source=source.name,
        heads=heads,
        learned_range=plan.learned_range,
        mean_square_noise=None if gamma is None else read_gamma(Path(gamma), source.schedule()),
        noise_caps=source.noise_caps,
    )


def read_state(path: Path) -> tuple[Family, dict[str, Tensor]]:
    """The family and the state_dict of a file, without wrappers and without the constants of the family."""
    file = weights_file(path)
    state = unwrap(read_file(file), _CONSTANTS, _HEADS)
    check_size(state.values(), file.stat().st_size)
    family = find_family(state)
    return family, {key: value for key, value in state.items() if key not in family.constants}


def read_gamma(path: Path, schedule: Schedule) -> Tensor:
    """The authors' Gamma_t = E mean(eps_hat^2) of Analytic-DPM, float64 at times 1..N. The file also holds time 0."""
    with naming(path):
        content = read_file(path)
        steps = schedule.grid_size
        if not isinstance(content, Tensor) or content.shape != (steps + 1,) or not content.is_floating_point():
            array = isinstance(content, Tensor)
            found = f"{tuple(content.shape)}, {content.dtype}" if array else type(content).__name__
            raise CheckpointError(
                f"Gamma must be an array of {steps + 1} numbers, one per time 0..{steps}; this is {found}"
            )
        values = content[1:].to(torch.float64, copy=True)
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise CheckpointError("Gamma is a mean of squares, but there are negative or infinite numbers in it")
    return values


def build_unet(family: Family, plan: Architecture, source: Source, image_size: int, trunk: State) -> Any:
    """The PaperUNet that the keys describe, with its weights, in eval mode."""
    from optcov.networks.paper_unet import PaperUNet  # diffusers takes seconds to import

    config = unet_config(family, plan, image_size)
    time = {"time_shift": source.time_argument.shift, "time_scale": source.time_argument.scale}
    try:
        with torch.device("meta"):  # shapes only: nothing is allocated before all of them have been checked
            unet = PaperUNet(**config, **time, dropout=source.dropout)
    except (ValueError, RuntimeError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"no network has the structure that its keys describe ({error})") from error
    weights = import_state(family.table(plan), trunk, unet.state_dict())
    unet.load_state_dict(weights, strict=True, assign=True)
    return unet.eval()


def export_checkpoint(unet: Any, head: Head | None = None) -> dict[str, Tensor]:
    """The state_dict of an imported network in the authors' layout, with one head or none.

    unet and head may also come from a bundle. So others can use a head that was fitted here.
    """
    family = _family_of(unet)
    state = {name: make() for name, make in family.constants.items()}
    state |= export_state(family.table(_plan_of(unet)), unet.state_dict())
    return state if head is None else state | head_files.export_head(family, head)


def _family_of(unet: Any) -> Family:
    """Whose network this is, judged by every setting that changes what it computes."""
    from optcov.networks.paper_unet import PaperUNet

    defaults = {name: option.default for name, option in inspect.signature(PaperUNet).parameters.items()}
    for family in FAMILIES:
        expected = defaults | unet_config(family, _plan_of(unet), 0)
        if all(
            same_setting(unet.config.get(name, value), value) for name, value in expected.items() if name not in _FREE
        ):
            return family
    raise CheckpointError(
        f"this {type(unet).__name__} is none of the paper's networks, so nobody's keys fit it; "
        f"save it by diffusers' save_pretrained"
    )


def _plan_of(unet: Any) -> Architecture:
    config = unet.config
    return Architecture(
        tuple(config["block_out_channels"]),
        config["layers_per_block"],
        tuple(block.startswith("Attn") for block in config["down_block_types"]),
        config["in_channels"],
        config["out_channels"],
    )


def _image_size(plan: Architecture, asked: int | None) -> int:
    size = plan.image_size if asked is None else asked
    if size is None:
        raise CheckpointError("no level attends, so the keys do not tell the size of its images; add --image-size")
    halvings = len(plan.channels) - 1
    if size < 2**halvings or size % 2**halvings:
        raise CheckpointError(f"images of {size} pixels cannot be halved {halvings} times; check --image-size")
    return size


def _head_of_other_file(path: Path, family: Family, trunk: State, unet: Any, channels: int) -> Head:
    """The head in a file of the same network with another head."""
    with naming(path):
        found, state = read_state(path)
        if found is not family:
            raise CheckpointError(f"its keys are those of {found.name}, but the network is of {family.name}")
        other, head_state = head_files.split(family, state)
        check_keys(family.table(_plan_of(unet)), other, unet.state_dict())
        if not head_state:
            raise CheckpointError("it holds no head beside the network")
        head_files.check_trunks_agree(trunk, other)
        return head_files.import_head(family, head_state, unet, channels)
