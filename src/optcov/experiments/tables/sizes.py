"""How large a table is run: quick for minutes on two cores, middle for hours, full as in the paper."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import final


@final
@dataclass(frozen=True)
class TableSize:
    """Numbers of images and steps."""

    name: str
    steps: tuple[int, ...]  # K of the tables of distances; none: those of the paper
    samples: int  # images drawn for a distance
    reference_images: int  # images that they are compared with; 0: as many as in the paper, or all
    likelihood_steps: tuple[int, ...]  # K of the tables of likelihoods
    images: int  # test images to score; 0: all, of the table of repeats as many as in the paper
    train_images: int  # training images that choose the optimal trajectories; 0: as many as in the paper
    times: int  # of the sweep; 0: all
    repeats: int  # of the table of repeats
    search_limit: int  # largest K that the table of timesteps tries
    target_steps: int  # its target is what A-DDIM reaches in so many steps
    tolerances: tuple[float, ...]  # of Gotta Go Fast
    timing_rounds: int
    schedules: tuple[str, ...]  # for networks of the VP SDE, which serve all of them


SIZES = MappingProxyType(
    {
        size.name: size
        for size in (
            TableSize(
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
            ),
            TableSize(
                name="middle",
                steps=(10, 25, 50, 100),
                samples=2000,
                reference_images=0,
                likelihood_steps=(10, 25, 50, 100, 200, 1000),
                images=512,
                train_images=512,
                times=0,
                repeats=5,
                search_limit=100,
                target_steps=25,
                tolerances=(0.5, 0.1, 0.05),
                timing_rounds=101,
                schedules=("linear", "cosine", "vp_sde"),
            ),
            TableSize(
                name="full",
                steps=(),
                samples=50_000,
                reference_images=0,
                likelihood_steps=(10, 25, 50, 100, 200, 400, 1000, 4000),
                images=0,
                train_images=0,
                times=0,
                repeats=5,
                search_limit=200,
                target_steps=25,
                tolerances=(0.5, 0.2, 0.1, 0.05, 0.02, 0.01),
                timing_rounds=201,
                schedules=("linear", "cosine", "vp_sde"),
            ),
        )
    }
)
