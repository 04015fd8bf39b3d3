"""Bits/dim of every covariance by even and optimal trajectories: one cell of tab:bpd, tab:improved_ddpm and tab:ll_var.

A cell is two sweeps, which give every covariance and every K at once; the three tables share cells where they can.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optcov.bundle import Bundle
from optcov.covariances import find_covariance
from optcov.data import ImageSet
from optcov.experiments.tables.cells import Result
from optcov.experiments.tables.images import TableImages
from optcov.forward import ForwardProcess
from optcov.likelihood import CostTable, Sweep, even_on_grid, likelihood_table
from optcov.likelihood.priced import priced_names
from optcov.reverse import ReverseProcess
from optcov.trajectory import Trajectory

if TYPE_CHECKING:
    from optcov.covariances import PerTime

LAST_VARIANCE = "paper"


def row_of(covariance: str) -> str:
    """The row of tab:bpd that a covariance has: its method of DDPM's forward process, or its label."""
    return find_covariance(covariance).row_at(eta=1)


def rows_by_covariance() -> dict[str, str]:
    """The rows of all covariances that a sweep scores."""
    return {name: row_of(name) for name in priced_names()}


def compute_likelihood(
    bundle: Bundle, images: TableImages, settings: Mapping[str, Any], scratch: Path, batch_size: int, identity: str
) -> Generator[float, None, Result]:
    """Sweep training images, if trajectories are to be chosen, then test images; score every covariance and K."""
    train_images, test_images = int(settings["train_images"]), int(settings["images"])
    train_share = train_images / (train_images + test_images)
    train: CostTable | None = None
    if train_images:
        sweep = _sweep(bundle, images.train, settings, f"{scratch}-train", batch_size, identity, train_images)
        yield from _shares(sweep, 0.0, train_share)
        train = sweep.table
    sweep = _sweep(bundle, images.test, settings, f"{scratch}-test", batch_size, identity, test_images, train)
    yield from _shares(sweep, train_share, 1.0)
    test = sweep.table
    rows = _even_rows(test, settings["lengths"]) if train is None else _rows(train, test, settings["lengths"])
    return {"rows": rows, "clamped": {name: list(rates) for name, rates in test.clamp_rates().items()}}


def _sweep(
    bundle: Bundle,
    images: ImageSet,
    settings: Mapping[str, Any],
    state: str,
    batch_size: int,
    identity: str,
    count: int,
    train: CostTable | None = None,
) -> Sweep:
    process = ReverseProcess(bundle.network, ForwardProcess(bundle.schedule), "beta_tilde", bundle.data_range)
    chosen = images.select(_choice(len(images), count, settings["image_seed"]))
    noise, residual = _numbers(bundle) if train is None else (train.mean_square_noise, train.mean_square_residual)
    grid = Trajectory.even(bundle.schedule, int(settings["times"]))
    told = None if "labels" not in settings or chosen.labels is None else bundle.told_labels(chosen.labels, images.name)
    return Sweep(
        process,
        chosen,
        times=list(grid.times),
        seed=int(settings["noise_seed"]),
        last_variances=[LAST_VARIANCE],
        mean_square_noise=noise,
        mean_square_residual=residual,
        condition=told,
        batch_size=batch_size,
        device=next(bundle.unet.parameters()).device,
        state=Path(f"{state}.safetensors"),
        identity=identity,
    )


def _numbers(bundle: Bundle) -> tuple[PerTime | None, PerTime | None]:
    """The bundle's numbers per time; what it lacks, the sweep measures on its own images."""
    known = {} if bundle.numbers is None else bundle.numbers.tensors()
    names = ("mean_square_noise", "mean_square_residual")
    noise, residual = (bundle.per_time(name) if name in known else None for name in names)
    return noise, residual


def _choice(available: int, count: int, seed: int | None) -> Tensor:
    """The first images, or random ones, in their order."""
    if seed is None:
        return torch.arange(count)
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values


def _shares(sweep: Sweep, begin: float, end: float) -> Generator[float, None, None]:
    for progress in sweep:
        yield begin + (end - begin) * progress.done / progress.total


def _rows(train: CostTable, test: CostTable, lengths: list[int]) -> list[Result]:
    """The rows of both kinds, and how much less OT needs than ET on the same images."""
    rows = []
    for row in likelihood_table(train, test, lengths, LAST_VARIANCE):
        record = {**row.to_json(), "gain": None}
        if row.kind == "OT":
            even = even_on_grid(test.grid, row.K)
            gain = test.difference(row.covariance, Trajectory(row.times), row.covariance, even, LAST_VARIANCE)
            record["gain"] = {"mean": gain.mean, "standard_error": gain.standard_error}
        rows.append(record)
    return rows


def _even_rows(test: CostTable, lengths: list[int]) -> list[Result]:
    rows = []
    for covariance in test.covariances:
        for K in lengths:
            trajectory = even_on_grid(test.grid, K)
            score = test.score(covariance, trajectory, LAST_VARIANCE)
            bits = {"mean": score.mean, "standard_error": score.standard_error, "count": score.count}
            rows.append({"covariance": covariance, "kind": "ET", "K": K, "bits_per_dim": bits, "difference": None})
    return rows
