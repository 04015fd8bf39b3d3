"""Scores of images by a bundle: bits/dim, and the times with the lowest bits/dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor

from optcov.bundle.bundle import Bundle
from optcov.bundle.conditions import with_labels
from optcov.bundle.directory import check_path
from optcov.bundle.sweeping import Conventions, Scored, sweep
from optcov.covariances import find_covariance
from optcov.likelihood import (
    Estimate,
    likelihood_table,
    pool_repeats,
)
from optcov.likelihood.result import BITS, NATS, Likelihoods
from optcov.methods import find_method
from optcov.networks.calls import takes_texts
from optcov.networks.guidance import check_guidance
from optcov.processes import this_process
from optcov.schedule import check_whole, is_whole
from optcov.storage import directory_lock
from optcov.trajectory import Trajectory


@final
@dataclass(frozen=True)
class OptimalTimes:
    """The best trajectory of every length for a method, with the scores that chose it."""

    bundle: Bundle  # with the trajectories in it
    trajectories: Mapping[int, Trajectory]  # by length
    scores: Mapping[int, Estimate]  # bits/dim on the images that chose them
    clamped: Mapping[str, tuple[float, float]]  # shares of variances below and above the bounds


def bits_per_dim(
    bundle: Bundle,
    test: Scored,
    train: Scored | None = None,
    steps: Sequence[int] = (10, 25),
    conventions: Conventions | None = None,
    *,
    repeats: int = 1,
    work: Path | None = None,
    **options: Any,
) -> Likelihoods:
    """Bound the bits/dim of test images for every covariance and number of steps K.

    The bound is taken at even times. With training images, it is also taken at the optimal times that they choose.
    repeats: score with this many seeds, and give means and standard deviations over them.
    options: those of `sweep`.
    """
    conventions = conventions or Conventions()
    runs, rates = [], {}
    with _held(work):
        for number in range(repeats):
            now = replace(conventions, seed=conventions.seed + number)
            chosen = None if train is None else sweep(bundle, train, now, work=work, lengths=steps, **options)
            source = chosen if chosen is not None else None if bundle.numbers is None else bundle
            table = sweep(bundle, test, now, work=work, numbers_from=source, lengths=steps, **options)
            rates = table.clamp_rates()
            runs.append(likelihood_table(chosen, table, steps, now.last_variance))
    rows = runs[0] if repeats == 1 else pool_repeats(runs)
    settings = {"eta": conventions.eta, "last_variance": conventions.last_variance, "cdf": conventions.cdf}
    settings |= {"repeats": repeats, "images": int(table.images.sum())}
    settings |= {} if chosen is None else {"train_images": int(chosen.images.sum())}
    latents = bundle.data_range is None
    how = "" if latents else f", cdf={conventions.cdf}"
    title = f"{bundle.name}: {NATS if latents else BITS} (last_variance={conventions.last_variance}{how})"
    return Likelihoods(tuple(rows), title, settings, rates, latents)


def score_tensor(
    bundle: Bundle,
    images: Any,
    steps: Sequence[int] | int = (10, 25),
    methods: Sequence[str] | None = None,
    *,
    condition: Mapping[str, Tensor] | None = None,
    labels: Any = None,
    guidance: float = 1.0,
    batch_size: int = 64,
    progress: bool = True,
    work: str | Path | None = None,
    **conventions: Any,
) -> Likelihoods:
    """`Bundle.bits_per_dim`: score images at even times, with one sweep for each number of steps."""
    lengths = _lengths(steps)
    if check_guidance(guidance) != 1:
        raise ValueError(
            f"guidance = {guidance} has no likelihood: the guided prediction is that of no model of the data; leave "
            f"guidance out"
        )
    if methods is not None:
        conventions["covariances"] = _covariances_of(methods)
    known_options = [entry.name for entry in fields(Conventions) if entry.name != "times"]
    unknown = [name for name in conventions if name not in known_options]
    if unknown:
        raise ValueError(
            f"bits_per_dim has no option {unknown[0]!r}; it has methods, condition, labels, batch_size, progress, "
            f"work, {', '.join(known_options)}"
        )
    check_whole("batch_size", batch_size, 1)
    data = bundle.data_of(images, "test")
    condition = with_labels(condition, labels, len(data))
    if condition is None and data.captions is not None and takes_texts(bundle.unet):
        raise ValueError(
            f"{data.name} has captions, but {bundle.name} holds nothing that encodes them; pass them encoded as "
            f"condition=, or images alone"
        )
    options: dict[str, Any] = {"condition": condition, "batch_size": batch_size, "progress": progress}
    options["work"] = None if work is None else check_path(work)
    parts = []
    for K in lengths:
        known = Conventions(**{**conventions, "times": K})
        parts.append(bits_per_dim(bundle, Scored(data, len(data), "given"), None, [K], known, **options))
    rows = tuple(row for part in parts for row in part.rows)
    return replace(parts[-1], rows=rows)


def optimal_trajectories(
    bundle: Bundle,
    images: Scored,
    method: str = "NPR-DDPM",
    max_steps: int = 100,
    conventions: Conventions | None = None,
    *,
    work: Path | None = None,
    **options: Any,
) -> OptimalTimes:
    """Find the times with the lowest bound of a method on training images, for every number of steps."""
    covariance = covariance_of(method)
    chosen = replace(conventions or Conventions(), covariances=(covariance,), eta=1.0)
    with _held(work):
        table = sweep(bundle, images, chosen, work=work, **options)
    best = table.optimal_all(covariance, min(max_steps, len(table.grid)), chosen.last_variance)
    scores = {K: table.score(covariance, path, chosen.last_variance) for K, path in best.items()}
    found = bundle.with_trajectories(method, list(best.values()))
    return OptimalTimes(found, best, scores, table.clamp_rates())


def _held(work: Path | None) -> AbstractContextManager[None]:
    """One lock for a run; its other processes write the states of their own sweeps alone."""
    return nullcontext() if work is None or not this_process().is_main_process else directory_lock(work)


def _lengths(steps: Any) -> list[int]:
    """Numbers of steps as a list, or a ValueError that names them."""
    found = (
        [steps]
        if is_whole(steps)
        else list(steps)
        if isinstance(steps, Iterable) and getattr(steps, "ndim", 1) != 0
        else []
    )
    if not found or not all(is_whole(K) and K >= 2 for K in found):
        raise ValueError(f"steps = {steps!r} must be numbers of steps of at least 2, such as 10 or [10, 25]")
    return [int(K) for K in dict.fromkeys(found)]


def _covariances_of(methods: Any) -> tuple[str, ...]:
    names = [methods] if isinstance(methods, str) else list(methods) if isinstance(methods, Iterable) else []
    if not names:
        raise ValueError(f"methods = {methods!r} names no method; pass a list such as ['NPR-DDPM'], or None for all")
    return tuple(dict.fromkeys(covariance_of(name) for name in names))


def covariance_of(method: str) -> str:
    """The covariance of a method; a method without a finite bound is a ValueError."""
    row = find_method(method)
    if row.covariance is None or row.eta != 1:
        raise ValueError(
            f"{row.name} has no finite variational bound: it needs a reverse process with noise; choose a method such "
            f"as {find_covariance(row.covariance or 'npr').row_at(1.0)}"
        )
    return row.covariance
