"""`optcov bpd`: the paper's table of likelihoods for a bundle, from two sweeps."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import (
    announce,
    check_out,
    check_seed,
    default_out,
    finish,
    images_to_score,
    names,
    numbers,
    print_json,
    print_table,
    resumable,
    tell_clamps,
)

FIRST_SCREEN = ("out", "images", "train_images", "times", "steps", "covariances", "seed", "schedule", "json")


def command(
    bundle: str = typer.Argument(help="A bundle: an embedded model's name, or a directory."),
    data: str = typer.Argument(help="Images: a directory, an npz/npy file, idx files, CIFAR-10, hf:NAME."),
    out: Path | None = typer.Option(
        None,
        callback=check_out,
        help="Directory for table, plots and the state of the sweeps; by default out/ and the bundle's name.",
    ),
    images: int = typer.Option(100, min=2, help="Test images to score."),
    train_images: int = typer.Option(100, min=2, help="Training images that choose the optimal trajectories."),
    times: int = typer.Option(0, min=0, help="Use only this many evenly spaced timesteps; 0: all."),
    steps: str = typer.Option("10,25,50,100,200,1000", help="Numbers of steps K."),
    covariances: str = typer.Option(
        "", help="Methods or covariances, separated by commas. By default all that the bundle can do."
    ),
    eta: float = typer.Option(1.0, help="Share of the forward noise, above 0, at most 1. 1 is DDPM."),
    last_variance: str = typer.Option("paper", help="Variance of the last step: paper or own."),
    cdf: str = typer.Option("exact", help="Normal CDF of the last step: exact, or tanh as the authors approximate it."),
    repeats: int = typer.Option(1, min=1, help="Repeat with this many seeds, and print mean and standard deviation."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of the noise."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    batch_size: int = typer.Option(64, min=1, help="Images per network evaluation; does not change the result."),
    labels: bool = typer.Option(True, help="Tell a network with classes the labels of the images."),
    json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:
    """Bound the likelihood of images: bits/dim for every covariance and number of steps, at even and optimal times."""
    from optcov import bundle as bundles
    from optcov import storage
    from optcov.bundle.scoring import bits_per_dim, covariance_of
    from optcov.bundle.sweeping import Conventions
    from optcov.covariances import Covariance
    from optcov.processes import this_process

    out = out or default_out(bundle, "bpd")
    model = bundles.load(bundle, schedule)
    chosen = [name if name in Covariance.registry else covariance_of(name) for name in names(covariances)]
    conventions = Conventions(tuple(chosen) or None, times, eta, last_variance, cdf, seed)
    test = images_to_score(data, model, "test", images, labels)
    train = images_to_score(data, model, "train", train_images, labels)
    with resumable(out):
        result = bits_per_dim(
            model,
            test,
            train,
            _lengths(steps),
            conventions,
            repeats=repeats,
            work=out,
            batch_size=batch_size,
            say=announce,
        )
    if not this_process().is_main_process:
        return
    content = {"bundle": bundle, "data": data, **result.to_json()}
    storage.write_json(out / "table.json", content)
    result.plot_all(out)
    tell_clamps(result.clamped)
    if json:
        print_json(content)
        return
    print_table(f"{bundle} on {data}: {result.unit} (--last-variance {last_variance} --cdf {cdf})", *result.cells())
    more = ["trajectory", bundle, data] if Path(bundle).is_dir() else ["table", "bpd", "--bundle", bundle]
    finish(out / "table.json", "optcov", *more)


def _lengths(text: str) -> list[int]:
    found = numbers(text, "--steps", "10,25,50")
    if min(found) < 2:
        raise ValueError(f"K = {min(found)} is too few steps for an even trajectory; --steps takes numbers from 2")
    return found
