"""`optcov match`: what Matched 2M needs to draw in few steps, measured once and kept in the bundle."""

from __future__ import annotations

from pathlib import Path

import typer

from optcov.console import announce, check_seed, finish, numbers, print_json, some_images


def command(
    bundle: Path = typer.Argument(help="Directory of a bundle; what is measured is stored in it."),
    data: str = typer.Argument(help="Training images: a directory, an npz/npy file, idx files, CIFAR-10, hf:NAME."),
    steps: str = typer.Option("5,10,25", help="Numbers of steps to prepare, by commas."),
    images: int = typer.Option(4096, min=2, help="Training images whose mean and spectrum are matched."),
    samples: int = typer.Option(512, min=2, help="Start noises that are sent along the trajectory."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of the start noises."),
    batch_size: int = typer.Option(64, min=1, help="Images per network evaluation."),
    json: bool = typer.Option(False, "--json", help="Print what was prepared as JSON."),
) -> None:
    """Prepare Matched 2M, the sampler for five to 25 steps. Each number of steps is kept as soon as it is measured."""
    from optcov import bundle as bundles

    wanted = numbers(steps, "--steps", "5,10,25")
    if not bundle.is_dir():
        raise ValueError(
            f"{bundle} is not a directory, so nothing can be stored in it; save an embedded model first, such as by "
            f"optcov.load('fashion').save('my-fashion')"
        )
    model = bundles.load(bundle, schedule)
    matched = some_images(data, model, "train", images).images.x_0()
    for K in wanted:
        announce(f"Matched 2M in {K} steps: {samples * (K - 1):,} network evaluations")
        model = model.with_matched_noise(matched, K, samples=samples, seed=seed, batch_size=batch_size, progress=True)
        model.save(bundle)
    if json:
        print_json({str(K): {"times": list(model.matched_noise(K).trajectory.times)} for K in wanted})
        return
    words = ["--schedule", schedule] if schedule else []
    finish(bundle, "optcov", "sample", str(bundle), "--method", "Matched 2M", "--steps", str(wanted[0]), *words)
