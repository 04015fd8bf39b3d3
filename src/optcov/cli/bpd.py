"""`optcov bpd`: the paper's table of likelihoods for a bundle, from two sweeps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.cli.console import finish, print_json, print_table, resumable
from optcov.cli.options import check_seed, default_out, numbers
from optcov.cli.sweeping import SweepOptions, report_clamps, run_sweep

if TYPE_CHECKING:
    from optcov.likelihood import LikelihoodRow


def command(
    bundle: str = typer.Argument(help="A bundle: an embedded model's name, or a directory."),
    data: str = typer.Argument(help="Images: a directory, an npz/npy file, idx files, CIFAR-10, hf:NAME."),
    out: Path | None = typer.Option(
        None, help="Directory for table, plots and the state of the sweeps; by default out/ and the bundle's name."
    ),
    images: int = typer.Option(100, min=2, help="Test images to score."),
    train_images: int = typer.Option(100, min=2, help="Training images that choose the optimal trajectories."),
    times: int = typer.Option(0, min=0, help="Sweep only this many evenly spaced times; 0: all of them."),
    steps: str = typer.Option("10,25,50,100,200,1000", help="Numbers of steps K."),
    designs: str = typer.Option("", help="Covariances, separated by commas; default all that the bundle can do."),
    eta: float = typer.Option(1.0, help="Forward process: 1 is DDPM's; the bound exists for eta in (0, 1]."),
    last_variance: str = typer.Option("paper", help="Variance of the last step: paper or own."),
    cdf: str = typer.Option("exact", help="Normal CDF of the last step: exact, or tanh as the authors approximate it."),
    repeats: int = typer.Option(1, min=1, help="Repeat with this many seeds: mean and standard deviation over them."),
    seed: int = typer.Option(0, callback=check_seed, help="Noise depends on (seed, image, time) alone."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    batch_size: int = typer.Option(64, min=1, help="Images per network evaluation; does not change the result."),
    json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:
    """Bound the negative log-likelihood of images: every covariance, every K, even and optimal trajectories."""
    from optcov import storage
    from optcov.likelihood import likelihood_table, pool_repeats
    from optcov.processes import this_process

    lengths = _lengths(steps)
    out = out or default_out(bundle, "bpd")
    runs: list[list[LikelihoodRow]] = []
    first = this_process().is_main_process
    # one lock for the run; its other processes write the states of their own sweeps alone
    with resumable(out), storage.directory_lock(out) if first else nullcontext():
        for number in range(repeats):
            options = SweepOptions(
                bundle, data, times, designs, eta, last_variance, cdf, seed + number, schedule, batch_size
            )
            train = run_sweep(options, "train", train_images, out, lengths=lengths)
            test = run_sweep(options, "test", images, out, numbers_from=train)
            report_clamps(test)
            runs.append(likelihood_table(train, test, lengths, last_variance))
        rows = runs[0] if repeats == 1 else pool_repeats(runs)
        conventions = {"eta": eta, "last_variance": last_variance, "cdf": cdf, "repeats": repeats}
        conventions |= {"images": int(test.images.sum()), "train_images": int(train.images.sum())}
        result = {"bundle": bundle, "data": data, **conventions, "rows": [row.to_json() for row in rows]}
        if not first:
            return
        storage.write_json(out / "table.json", result)
        _plot(rows, out)
    if json:
        print_json(result)
        return
    _print(rows, f"{bundle} on {data}: bits/dim, last variance {last_variance}, cdf {cdf}")
    more = ["trajectory", bundle, data] if Path(bundle).is_dir() else ["table", "bpd", "--bundle", bundle]
    finish(out / "table.json", "optcov", *more)


def _plot(rows: list[LikelihoodRow], out: Path) -> None:
    from optcov.likelihood.plots import plot_bits, plot_terms, plot_times

    K = rows[len({row.K for row in rows}) // 2].K
    plot_bits(rows, out / "bits-per-dim.png")
    plot_terms(rows, K, out / "terms.png")
    plot_times(rows, K, out / "times.png")


def _print(rows: list[LikelihoodRow], title: str) -> None:
    lengths = sorted({row.K for row in rows})
    cells = {(row.kind, row.design, row.K): str(row.bits_per_dim) for row in rows}
    names = list(dict.fromkeys((row.kind, row.design) for row in sorted(rows, key=lambda row: row.kind)))
    print_table(
        title,
        ("", *(f"K = {K}" for K in lengths)),
        [(f"{kind} {design}", *(cells[kind, design, K] for K in lengths)) for kind, design in names],
    )


def _lengths(text: str) -> list[int]:
    found = numbers(text, "--steps", "10,25,50")
    if min(found) < 2:
        raise ValueError(f"K = {min(found)} is too few steps for an even trajectory; --steps takes numbers from 2")
    return found
