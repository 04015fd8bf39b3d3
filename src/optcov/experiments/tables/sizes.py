"""How large a table is run: quick for minutes on two cores, middle for hours, full as in the paper."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import final

MOST_SAMPLES = 2**20  # of a row; images of higher numbers belong to a reference that is drawn


@final
@dataclass(frozen=True)
class TableSize:
    """Numbers of images and steps; those of the middle size unless told."""

    name: str = "middle"
    steps: tuple[int, ...] = (10, 25, 50, 100)  # K of the tables of distances; none: those of the paper
    samples: int = 2000  # images drawn for a distance
    reference_images: int = 0  # images that they are compared with; 0: as many as in the paper, or all
    likelihood_steps: tuple[int, ...] = (10, 25, 50, 100, 200, 1000)  # K of the tables of likelihoods
    images: int = 512  # test images to score; 0: all, of the table of repeats as many as in the paper
    train_images: int = 512  # training images that choose the optimal trajectories; 0: as many as in the paper
    times: int = 0  # of the sweep; 0: all
    repeats: int = 5  # of the table of repeats
    search_limit: int = 100  # largest K that the table of timesteps tries
    target_steps: int = 25  # its target is what A-DDIM reaches in so many steps
    tolerances: tuple[float, ...] = (0.5, 0.1, 0.05)  # of Gotta Go Fast
    timing_rounds: int = 101
    schedules: tuple[str, ...] = ("linear", "cosine", "vp_sde")  # for networks of the VP SDE, which serve all of them

    def __post_init__(self) -> None:
        if self.samples > MOST_SAMPLES:
            raise ValueError(f"{self.samples} samples are too many for a distance; draw {MOST_SAMPLES} or fewer")


_QUICK = TableSize(
    name="quick",
    steps=(5, 10),
    samples=192,
    reference_images=5000,
    likelihood_steps=(10, 25, 50, 100),
    images=96,
    train_images=96,
    times=100,
    repeats=3,
    search_limit=40,
    target_steps=10,
    tolerances=(0.5,),
    timing_rounds=25,
    schedules=("linear", "vp_sde"),
)
_FULL = TableSize(
    name="full",
    steps=(),
    samples=50_000,
    likelihood_steps=(10, 25, 50, 100, 200, 400, 1000, 4000),
    images=0,
    train_images=0,
    search_limit=200,
    tolerances=(0.5, 0.2, 0.1, 0.05, 0.02, 0.01),
    timing_rounds=201,
)
SIZES = MappingProxyType({size.name: size for size in (_QUICK, TableSize(), _FULL)})
