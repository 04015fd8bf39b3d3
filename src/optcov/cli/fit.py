"""`optcov fit`: heads and numbers per time for a noise predictor, as a bundle."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from optcov.cli.console import announce, errors, finish, print_json, print_table, resumable, tell_left_out
from optcov.cli.options import check_seed, counted, names
from optcov.cli.progress import track, watch_passes
from optcov.cli.train import show

if TYPE_CHECKING:
    from torch import Tensor

    from optcov.bundle import Bundle, NumbersPerTime
    from optcov.data import ImageSet
    from optcov.fitting import Batches, HeadTask
    from optcov.fitting.score import SampleScore


def command(
    source: Path = typer.Argument(help="A DDPMPipeline or UNet2DModel on disk, a bundle, or a run of `optcov train`."),
    data: str = typer.Argument(help="Training images, as for `optcov train`."),
    out: Path = typer.Option(..., help="Directory of the bundle to write."),
    heads: str = typer.Option("sn,npr,range", help="Heads to fit; none measures the numbers per time alone."),
    kind: str = typer.Option("auto", help="auto, timed, conv or residual; residual heads train by AdamW."),
    images: int = typer.Option(4096, min=1, help="Images of a closed-form fit."),
    paper_exact: bool = typer.Option(
        False, help="Mean squared error with linear output, for residual heads with dropout on, as in the paper."
    ),
    time_weighted: bool = typer.Option(
        False, help="With --paper-exact: divide squared errors by the mean target's square."
    ),
    steps: int = typer.Option(20_000, help="Steps of AdamW; the paper's are 500,000 of batch 128."),
    batch_size: int = typer.Option(64, min=1, help="Images per batch."),
    learning_rate: float = typer.Option(1e-4, help="Peak learning rate of AdamW."),
    checkpoint_every: int = typer.Option(1000, help="Steps of AdamW between checkpoints."),
    score_samples: int = typer.Option(
        0,
        min=0,
        help="Judge each checkpoint of residual heads by the Frechet distance of so many samples; 0: the last.",
    ),
    score_steps: int = typer.Option(50, help="Reverse steps of these samples."),
    score_features: str = typer.Option("fashion", help="Their features: fashion, lite0 or inception:FILE."),
    times: int = typer.Option(100, min=0, help="Times at which the numbers per time are measured; 0 for every one."),
    measure_images: int = typer.Option(
        512, min=0, help="Images per time; 0 takes the numbers from the fit's own samples."
    ),
    calibration_samples: int = typer.Option(2048, min=0, help="Held-out samples for the calibration; 0 for none."),
    half: bool = typer.Option(
        True, help="Round a new noise predictor to float16 first, to store it in half the space."
    ),
    flip: bool = typer.Option(True, help="Mirror images at random."),
    schedule: str | None = typer.Option(
        None, help="Schedule of a UNet2DModel alone: vp_sde, linear or cosine; default diffusers' linear one."
    ),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of times and noise."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace a bundle or an unfinished fit of other settings."
    ),
    json: bool = typer.Option(False, "--json", help="Print the bundle's description as JSON, as optcov info does."),
) -> None:
    """Fit heads and measure the numbers per time (stage 2)."""
    from optcov import __version__
    from optcov.bundle.description import describe
    from optcov.bundle.sampler import suggested_method
    from optcov.fitting import Batches, new_heads, time_grid
    from optcov.fitting.fit_run import RECORD, FitRun, fit_identity
    from optcov.fitting.loop import mixed_precision
    from optcov.fitting.sources import open_predictor
    from optcov.processes import accelerator, this_process
    from optcov.storage import directory_lock

    # everything that can be refused is looked at before the long work
    bundle = open_predictor(source, schedule, half)
    bundle.check_target(out)
    bundle.check_loadable()
    tell_left_out(bundle)
    train, test = _images(bundle, data, calibration_samples > 0)
    loss = "mse" if paper_exact else "gamma"
    # a network that learned its variance keeps it in the place of a head
    own = {"range"} if bundle.network.learned_range else set()
    chosen = [] if heads == "none" else [name for name in names(heads) if name not in own]
    example = train.unit(slice(0, 1))
    tasks = new_heads(bundle.network, example, chosen, None if kind == "auto" else kind, loss, seed) if chosen else {}
    closed_form = bool(tasks) and kind != "residual"
    grid = time_grid(bundle.network.native_schedule, times or None)
    _check_measurement(len(grid), measure_images, closed_form)
    if score_samples and kind != "residual":
        raise ValueError("only residual heads have checkpoints to choose among by a score; use --kind residual")
    score = _score(bundle, tasks, train, score_samples, score_steps, score_features, seed)
    batches = Batches(train, bundle.schedule, batch_size, seed, flip)
    settings: dict[str, Any] = {"loss": loss, "seed": seed, "flip": flip, "batch_size": batch_size}
    settings |= {"half": half, "calibration_samples": calibration_samples}
    if closed_form:
        settings |= {"samples": images, "time_weighted": time_weighted}
    elif tasks:
        settings |= {"steps": steps, "learning_rate": learning_rate, "paper_exact": paper_exact}
        settings |= {"score": None, "checkpoint_every": None, **mixed_precision(accelerator())}
        if score is not None:  # else these change nothing
            settings |= {"score": asdict(score.settings), "checkpoint_every": checkpoint_every}
    options = {**settings, "kind": kind, "measure_images": measure_images}
    run = FitRun(out, fit_identity(bundle, chosen, train, test, grid, options), overwrite)
    state, work = this_process(), run.work
    settings |= {"data": train.checksum}
    settings |= {"images": min(images, len(train))} if closed_form else {"checkpoint_every": checkpoint_every}
    if not run.finished:
        announce(
            f"{'goes on with the fit that was stopped: ' if run.resumes else ''}"
            f"fits {', '.join(chosen) or 'no heads'} of {bundle.name} ({bundle.schedule!r}, predicts "
            f"{bundle.network.parameterisation}) on {_used(len(train), images if closed_form else None)} of "
            f"{train.name}, measures {_measured(len(train), measure_images, len(grid))}, and writes {out}"
        )
        with resumable(work), directory_lock(work) if state.is_main_process else nullcontext():
            if state.is_main_process:
                run.begin()
            state.wait_for_everyone()  # nobody looks for what is kept before what is not is gone
            if closed_form:
                bundle = bundle.with_numbers(_fit(bundle, tasks, batches, loss, settings))
            elif tasks:
                settings |= _train(bundle, tasks, batches, work, loss, paper_exact, settings, score)
            if tasks:
                bundle = bundle.with_heads({name: task.module for name, task in tasks.items()}, bundle.backbone)
                history = {**settings, "kind": kind, "names": chosen, "optcov": __version__}
                bundle = bundle.with_provenance(heads=history)
            if measure_images:
                bundle = bundle.with_numbers(_measure(bundle, train, grid, measure_images, batch_size, seed, work))
            measured = {"data": train.checksum, "seed": seed, "images": min(measure_images or images, len(train))}
            bundle = bundle.with_provenance(numbers={**measured, "optcov": __version__})
            if test is not None:
                bundle = _calibrate(bundle, test, calibration_samples, seed)
            if state.is_main_process:
                bundle.with_provenance(**{RECORD: run.identity}).save(out)
                run.end()
    if not state.is_main_process:
        return
    if run.finished:
        announce(f"{out} is this very fit already: nothing to do (--overwrite fits it again)")
        with directory_lock(work):  # unless another process fits it again just now
            run.end()
    if json:
        print_json(describe(str(out)))
        return
    finish(out, "optcov", "sample", str(out), "--method", suggested_method(bundle))


def _used(there: int, asked: int | None) -> str:
    return counted(there, 0, "images") if asked is None else counted(min(there, asked), asked, "images")


def _measured(there: int, asked: int, times: int) -> str:
    return f"{counted(min(there, asked), asked, 'images')} at {times} times" if asked else "nothing more"


def _check_measurement(times: int, images: int, closed_form: bool) -> None:
    if images == 1 or (images == 0 and not closed_form):
        raise ValueError(
            f"the numbers per time cannot be measured on {images} images; use --measure-images 2 or more"
            f"{'' if images else ' (only a closed-form fit gathers them from its own samples)'}"
        )
    if images and times < 3:
        raise ValueError(f"{times} times are too few to judge an interpolation; use --times 3 or more")


def _score(
    bundle: Bundle,
    tasks: dict[str, HeadTask],
    images: ImageSet,
    samples: int,
    steps: int,
    features: str,
    seed: int,
) -> SampleScore | None:
    """What judges heads by samples: those of the method that uses the first head."""
    from optcov.fitting.score import SampleScore, ScoreSettings

    if not samples or not tasks:
        return None
    method = {"sn": "SN-DDPM", "npr": "NPR-DDPM", "range": "Improved DDPM"}[next(iter(tasks))]
    headed = bundle.with_heads({name: task.module for name, task in tasks.items()}, bundle.backbone)
    return SampleScore(headed.network, images, ScoreSettings(samples, steps, method, features, seed))


def _images(bundle: Bundle, data: str, held_out: bool) -> tuple[ImageSet, ImageSet | None]:
    """What heads are fitted on, and what they are calibrated on."""
    from optcov import data as image_data

    channels = bundle.image_shape[0]
    train = image_data.with_channels(image_data.load(data, "train"), channels)
    if train.shape != tuple(bundle.image_shape):
        raise ValueError(
            f"the noise predictor takes images of shape {tuple(bundle.image_shape)}, but {train.name} has "
            f"{train.shape}; use the images that it was trained on"
        )
    return train, image_data.with_channels(image_data.load(data, "test"), channels) if held_out else None


def _fit(
    bundle: Bundle, tasks: dict[str, HeadTask], batches: Batches, loss: str, settings: dict[str, Any]
) -> NumbersPerTime:
    import torch

    from optcov.fitting import fit_closed_form

    with torch.no_grad(), watch_passes("heads") as note:
        samples, weighted = settings["samples"], settings["time_weighted"]
        fit = fit_closed_form(bundle.network, tasks, batches, samples, loss, weighted, note)
    rows = [
        (name, len(r.losses), f"{r.losses[-1]:.4f}", "yes" if r.converged else "no") for name, r in fit.reports.items()
    ]
    print_table("closed-form fit", ("head", "passes", "loss per pixel", "converged"), rows, errors)
    return fit.numbers


def _train(
    bundle: Bundle,
    tasks: dict[str, HeadTask],
    batches: Batches,
    work: Path,
    loss: str,
    dropout: bool,
    settings: dict[str, Any],
    score: SampleScore | None,
) -> dict[str, Any]:
    """Train, and return every setting of the training."""
    from optcov.fitting import TrainingConfig, train_heads

    config = TrainingConfig(
        steps=settings["steps"],
        batch_size=batches.batch_size,
        learning_rate=settings["learning_rate"],
        warmup=min(1000, settings["steps"] // 10),
        decay="constant",
        ema=0.9999,
        seed=settings["seed"],
        checkpoint_every=settings["checkpoint_every"],
    )
    identity = {
        "data": settings["data"],
        "flip": settings["flip"],
        "score": None if score is None else asdict(score.settings),
    }
    records = train_heads(bundle.network, tasks, batches, config, work / "training", loss, dropout, identity, score)
    show(records, config.steps, "stage 2")
    return {**asdict(config), **identity, "dropout": dropout}


def _measure(bundle: Bundle, images: ImageSet, grid: Tensor, count: int, batch_size: int, seed: int, work: Path) -> Any:
    from optcov.fitting import gather, interpolation_error, measure

    native = bundle.network.native_schedule
    records = measure(bundle.network, images, grid, count, batch_size, seed, work)
    numbers = gather(track(records, len(grid), "numbers per time", "times"))
    for name in ("mean_square_noise", "mean_square_residual"):
        error = interpolation_error(numbers, native, name)
        errors.print(f"{name}: interpolation error about {error:.1g}", highlight=False)
    return numbers


def _calibrate(bundle: Bundle, test: ImageSet, samples: int, seed: int) -> Bundle:
    from optcov.fitting import calibrate

    record = {}
    for name in ("npr", "sn"):
        if name in bundle.network.heads:
            with watch_passes(f"calibration of {name}") as note:
                result = calibrate(bundle.network, test, name, samples, seed=seed + 1, progress=note)
            record[name] = result.to_json()
            rows = [
                (f"{low:.4g}..{high:.4g}", f"{ratio:.3f}", f"{error:.3f}")
                for low, high, ratio, error in zip(
                    result.edges[:-1], result.edges[1:], result.ratio, result.error, strict=True
                )
            ]
            print_table(
                f"calibration of the head {name} on held-out images",
                ("t", "predicted / measured", "error"),
                rows,
                errors,
            )
    return bundle.with_provenance(calibration=record)
