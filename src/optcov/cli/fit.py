"""`optcov fit`: heads and numbers per time for a noise predictor, as a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from optcov.cli.console import errors, finish, print_table, track
from optcov.cli.train import show

if TYPE_CHECKING:
    from optcov.bundle import Bundle
    from optcov.data import ImageSet
    from optcov.training import Batches, HeadTask


def command(
    source: Path = typer.Argument(help="A run of `optcov train`, a bundle, or a diffusers unet directory."),
    data: str = typer.Argument(help="Training images, as for `optcov train`."),
    out: Path = typer.Option(..., help="Directory of the bundle to write."),
    heads: str = typer.Option("sn,npr,range", help="Heads to fit."),
    kind: str = typer.Option("auto", help="auto, timed, conv or residual; residual heads train by AdamW."),
    images: int = typer.Option(4096, help="Images of a closed-form fit."),
    paper_exact: bool = typer.Option(
        False, help="Mean squared error with linear output, dropout on; 500,000 steps of batch 128 are the paper's."
    ),
    time_weighted: bool = typer.Option(False, help="Divide squared errors by the square of each time's mean target."),
    steps: int = typer.Option(20_000, help="Steps of AdamW."),
    batch_size: int = typer.Option(64, help="Images per batch."),
    learning_rate: float = typer.Option(1e-4, help="Peak learning rate of AdamW."),
    checkpoint_every: int = typer.Option(1000, help="Steps of AdamW between checkpoints."),
    times: int = typer.Option(100, help="Times at which the numbers per time are measured; 0 for every one."),
    measure_images: int = typer.Option(512, help="Images per time; 0 takes the numbers from the fit's own samples."),
    calibration_samples: int = typer.Option(2048, help="Held-out samples for the calibration; 0 for none."),
    half: bool = typer.Option(
        True, help="Round a new noise predictor to float16 first, to store it in half the space."
    ),
    flip: bool = typer.Option(True, help="Mirror images at random."),
    schedule: str = typer.Option("vp_sde", help="Schedule of a diffusers unet: vp_sde, linear or cosine."),
    seed: int = typer.Option(0, help="Seed of times and noise."),
) -> None:
    """Fit heads and measure the numbers per time (stage 2)."""
    import torch

    from optcov import data as image_data
    from optcov.training import Batches, fit_closed_form, new_heads
    from optcov.training.sources import open_predictor

    bundle = open_predictor(source, schedule, half)
    train = image_data.load(data, "train")
    loss = "mse" if paper_exact else "gamma"
    names = [name.strip() for name in heads.split(",") if name.strip()]
    example = _example(bundle, train)
    tasks = new_heads(bundle.network, example, names, None if kind == "auto" else kind, loss, seed)
    batches = Batches(train, bundle.schedule, batch_size, seed, flip)
    settings = {"data": train.checksum, "loss": loss, "seed": seed, "flip": flip, "batch_size": batch_size}
    if kind == "residual":
        settings |= {"steps": steps, "learning_rate": learning_rate}
        _train(bundle, tasks, batches, out, loss, paper_exact, settings, checkpoint_every)
        numbers = None
    else:
        settings |= {"images": images, "time_weighted": time_weighted}
        with torch.no_grad():
            fit = fit_closed_form(bundle.network, tasks, batches, images, loss, time_weighted, _note_passes())
        numbers = fit.numbers
        rows = [(name, len(r.losses), r.losses[-1], r.converged) for name, r in fit.reports.items()]
        print_table("closed-form fit", ("head", "passes", "loss per pixel", "converged"), rows)
    bundle = bundle.with_heads({name: task.module for name, task in tasks.items()}, bundle.backbone)
    bundle = bundle.with_provenance(heads={**settings, "kind": kind, "names": names})
    if measure_images or numbers is None:
        numbers = _measure(bundle, train, times, max(2, measure_images), batch_size, seed, out)
    bundle = bundle.with_numbers(numbers)
    if calibration_samples:
        bundle = _calibrate(bundle, data, calibration_samples, seed)
    bundle.save(out)
    finish(out, f"optcov sample {out} --method NPR-DDPM --steps 25")


def _example(bundle: Bundle, images: ImageSet) -> Any:
    import torch

    if images.shape != tuple(bundle.image_shape):
        raise ValueError(
            f"the noise predictor takes images of shape {tuple(bundle.image_shape)}, but {images.name} has "
            f"{images.shape}; use the images that it was trained on"
        )
    return images.unit(torch.arange(1))


def _train(
    bundle: Bundle,
    tasks: dict[str, HeadTask],
    batches: Batches,
    out: Path,
    loss: str,
    dropout: bool,
    settings: dict[str, Any],
    checkpoint_every: int,
) -> None:
    from optcov.training import TrainingConfig, train_heads

    config = TrainingConfig(
        steps=settings["steps"],
        batch_size=batches.batch_size,
        learning_rate=settings["learning_rate"],
        warmup=min(1000, settings["steps"] // 10),
        decay="constant",
        ema=0.9999,
        seed=settings["seed"],
        checkpoint_every=checkpoint_every,
    )
    identity = {"data": settings["data"], "flip": settings["flip"]}
    records = train_heads(bundle.network, tasks, batches, config, _work(out), loss, dropout, identity)
    show(records, config.steps, "stage 2")


def _measure(bundle: Bundle, images: ImageSet, times: int, count: int, batch_size: int, seed: int, out: Path) -> Any:
    from optcov.training import gather, interpolation_error, measure, time_grid

    native = bundle.network.native_schedule
    grid = time_grid(native, times or None)
    records = measure(bundle.network, images, grid, count, batch_size, seed, _work(out))
    numbers = gather(track(records, len(grid), "numbers per time", "times"))
    for name in ("mean_square_noise", "mean_square_residual"):
        error = interpolation_error(numbers, native, name)
        errors.print(f"{name}: interpolation error about {error:.1g}", highlight=False)
    return numbers


def _calibrate(bundle: Bundle, data: str, samples: int, seed: int) -> Bundle:
    from optcov import data as image_data
    from optcov.training import calibrate

    test = image_data.load(data, "test")
    record = {}
    for name in ("npr", "sn"):
        if name in bundle.network.heads:
            result = calibrate(bundle.network, test, name, samples, seed=seed + 1)
            record[name] = result.to_json()
            rows = [
                (f"{low:.3g}..{high:.3g}", f"{ratio:.3f}", f"{error:.3f}")
                for low, high, ratio, error in zip(
                    result.edges[:-1], result.edges[1:], result.ratio, result.error, strict=True
                )
            ]
            print_table(f"calibration of {name} on held-out images", ("t", "predicted / measured", "error"), rows)
    return bundle.with_provenance(calibration=record)


def _work(out: Path) -> Path:
    """Where a fit keeps what a restart needs, beside the bundle."""
    return out.with_name(f"{out.name}.work")


def _note_passes() -> Any:
    passes = 0

    def note(done: int, total: int) -> None:
        nonlocal passes
        if done == total:
            passes += 1
            errors.print(f"pass {passes} over {total} batches", highlight=False)

    return note
