"""`optcov trajectory`: find the optimal trajectories of a method, and store them in the bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from optcov.console import (
    announce,
    check_out,
    check_seed,
    default_out,
    finish,
    images_to_score,
    print_json,
    print_table,
    resumable,
    tell_clamps,
)

FIRST_SCREEN = ("out", "method", "max_steps", "images", "times", "seed", "json")


def command(
    bundle: Path = typer.Argument(help="Directory of a bundle; the trajectories are stored in it."),
    data: str = typer.Argument(help="Images: a directory, an npz/npy file, idx files, CIFAR-10, hf:NAME."),
    method: str = typer.Option("NPR-DDPM", help="The method whose bound is made lowest."),
    max_steps: int = typer.Option(100, min=1, help="Find the best trajectory of every length up to this."),
    images: int = typer.Option(100, min=2, help="Training images that choose the trajectories."),
    times: int = typer.Option(0, min=0, help="Choose among this many evenly spaced timesteps; 0: all."),
    last_variance: str = typer.Option("paper", help="Variance of the last step: paper or own."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of the noise."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    batch_size: int = typer.Option(64, min=1, help="Images per network evaluation; does not change the result."),
    out: Path | None = typer.Option(
        None,
        callback=check_out,
        help="Directory for the state of the sweep and the plot; by default out/ and the bundle's name.",
    ),
    diffusers: Path | None = typer.Option(None, help="Also write diffusers' timesteps by length to this JSON file."),
    json: bool = typer.Option(False, "--json", help="Print the trajectories as JSON."),
) -> None:
    """Find the timesteps with the lowest bound on training images, for every number of steps, and save them."""
    from optcov import bundle as bundles
    from optcov import storage
    from optcov.bundle.scoring import optimal_trajectories
    from optcov.bundle.sweeping import Conventions
    from optcov.likelihood.plots import plot_lengths
    from optcov.methods import find_method
    from optcov.processes import this_process

    if not bundle.is_dir():
        raise ValueError(
            f"{bundle} is not a directory, so no trajectories can be stored in it; save an embedded model first, "
            f"such as by optcov.load('fashion').save('my-fashion')"
        )
    out = out or default_out(bundle, "trajectory")
    model = bundles.load(bundle, schedule)
    conventions = Conventions(times=times, last_variance=last_variance, seed=seed)
    scored = images_to_score(data, model, "train", images)
    with resumable(out):
        found = optimal_trajectories(
            model, scored, method, max_steps, conventions, work=out, batch_size=batch_size, say=announce
        )
    if not this_process().is_main_process:
        return
    tell_clamps(found.clamped)
    found.bundle.save(bundle)
    best, scores, name = found.trajectories, found.scores, find_method(method).name
    plot_lengths({K: best[K].times for K in _shown(best)}, out / "times.png", name)
    if diffusers is not None:
        storage.write_json(diffusers, {str(K): path.diffusers_timesteps(model.schedule) for K, path in best.items()})
    if json:
        print_json({str(K): {"times": list(path.times), "bits_per_dim": scores[K].mean} for K, path in best.items()})
        return
    print_table(
        f"{name}: optimal trajectories, bits/dim on the images that chose them",
        ("K", "bits/dim", "times"),
        [(K, scores[K], _short(best[K].times)) for K in _shown(best)],
    )
    finish(bundle, "optcov", "bpd", str(bundle), data, *(["--schedule", schedule] if schedule else []))


def _shown(best: Mapping[int, object]) -> list[int]:
    return [K for K in sorted({2, 5, 10, 25, 50, 100, 200, max(best)}) if K in best]


def _short(times: Sequence[float]) -> str:
    return ", ".join(f"{t:g}" for t in times) if len(times) <= 8 else f"{times[0]:g}, {times[1]:g}, ... {times[-1]:g}"
