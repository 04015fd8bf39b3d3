"""The paper's six networks: what their files cannot say (Appendix F).

Schedule, time argument, dropout, the cap y on the last noise, and which head is which. All are sampled along
even trajectories, and scored along even and optimal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from optcov.checkpoints.architecture import Architecture, Family
from optcov.checkpoints.ddpm import DDPM
from optcov.checkpoints.errors import CheckpointError
from optcov.checkpoints.improved_diffusion import IMPROVED_DIFFUSION
from optcov.checkpoints.layout import State
from optcov.checkpoints.ncsnpp import NCSNPP
from optcov.networks import TimeArgument
from optcov.schedule import Schedule

FAMILIES = (IMPROVED_DIFFUSION, DDPM, NCSNPP)


@final
@dataclass(frozen=True)
class Source:
    """One of the paper's pretrained networks."""

    name: str
    title: str  # as in the paper's tables
    family: Family
    multipliers: tuple[int, ...]  # of the widths by level
    blocks: int
    schedule: Callable[[], Schedule]
    time_argument: TimeArgument
    dropout: float
    sn_head: str = "conv"  # structure of the SN head in the paper; that of the NPR head is always "conv"
    noise_cap_ddpm: float = 1.0  # y under the DDPM forward process
    learned_range: bool = False

    def fits(self, family: Family, plan: Architecture) -> bool:
        """Whether a checkpoint is this network, at any width."""
        same = (self.family.name, self.multipliers, self.blocks) == (family.name, plan.multipliers, plan.blocks)
        return same and plan.learned_range == self.learned_range

    @property
    def noise_caps(self) -> dict[str, float]:
        """The paper's y by method."""
        if not self.schedule().discrete:
            return dict.fromkeys(("A-DPM", "NPR-DPM", "SN-DPM"), self.noise_cap_ddpm)
        ddpm = dict.fromkeys(("A-DDPM", "NPR-DDPM", "SN-DDPM"), self.noise_cap_ddpm)
        return ddpm | dict.fromkeys(("A-DDIM", "NPR-DDIM", "SN-DDIM"), 1.0)


_TIMES_FROM_1, _TIMES_FROM_0 = TimeArgument(1.0), TimeArgument(1.0, shift=1)
# fmt: off
_ALL = (
    Source("cifar10-ls", "CIFAR10 (LS)", IMPROVED_DIFFUSION, (1, 2, 2, 2), 3, Schedule.linear, _TIMES_FROM_1,
           dropout=0.3, noise_cap_ddpm=2.0),
    Source("cifar10-cs", "CIFAR10 (CS)", IMPROVED_DIFFUSION, (1, 2, 2, 2), 3, Schedule.cosine, _TIMES_FROM_1,
           dropout=0.3),
    Source("cifar10-vp-sde", "CIFAR10 (VP SDE)", NCSNPP, (1, 2, 2, 2), 4, Schedule.vp_sde, TimeArgument(999.0),
           dropout=0.1, noise_cap_ddpm=2.0),
    Source("celeba64", "CelebA 64x64", DDPM, (1, 2, 2, 2, 4), 2, Schedule.linear, _TIMES_FROM_0,
           dropout=0.1, noise_cap_ddpm=2.0),
    Source("imagenet64", "ImageNet 64x64", IMPROVED_DIFFUSION, (1, 2, 3, 4), 3, lambda: Schedule.cosine(4000),
           TimeArgument(0.25, shift=1), dropout=0.0, sn_head="residual", learned_range=True),
    Source("lsun-bedroom", "LSUN Bedroom", DDPM, (1, 1, 2, 2, 4, 4), 2, Schedule.linear, _TIMES_FROM_0,
           dropout=0.0, sn_head="residual"),
)
# fmt: on

SOURCES: Mapping[str, Source] = MappingProxyType({source.name: source for source in _ALL})


def find_family(state: State) -> Family:
    """Which network code wrote these keys."""
    for family in FAMILIES:
        if family.marker in state:
            return family
    known = ", ".join(f"{family.marker} ({family.name})" for family in FAMILIES)
    raise CheckpointError(f"its keys are of no network known here; one of these would tell: {known}")


def find_source(family: Family, plan: Architecture, name: str | None) -> Source:
    """Which of the paper's networks this is: by name if one is given, else the only one that fits.

    A name may also say how a network that is none of the paper's was trained, but not contradict the keys.
    """
    fitting = [source for source in SOURCES.values() if source.fits(family, plan)]
    if name is not None:
        return _named(name, family, fitting)
    if len(fitting) == 1:
        return fitting[0]
    related = fitting or [source for source in SOURCES.values() if source.family is family]
    reason = "fits more than one network" if fitting else "has the widths of no network of the paper"
    names = " or --as ".join(source.name for source in related)
    raise CheckpointError(f"it {reason}; say how it was trained by --as {names}")


def _named(name: str, family: Family, fitting: list[Source]) -> Source:
    source = by_name(name)
    if source.family is not family:
        raise CheckpointError(
            f"--as {source.name} is a network of {source.family.name}, but its keys are those of {family.name}"
        )
    if fitting and source not in fitting:
        found = " or ".join(other.name for other in fitting)
        raise CheckpointError(f"--as {source.name} has other widths and blocks; its keys are those of {found}")
    return source


def by_name(name: str) -> Source:
    """The one source whose name or title begins so, however it is punctuated: cifar10_ls, CIFAR10 (LS), lsun."""
    asked = _letters(name)
    names = {source.name: (_letters(source.name), _letters(source.title)) for source in SOURCES.values()}
    meant = [key for key, known in names.items() if asked and any(other.startswith(asked) for other in known)]
    if len(meant) != 1:
        raise CheckpointError(f"unknown network {name[:80]!r}; choose one of {', '.join(SOURCES)}")
    return SOURCES[meant[0]]


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
