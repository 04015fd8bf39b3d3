"""`optcov fit`: fit heads and numbers per time for a noise predictor, and save a bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.console import (
    announce,
    check_seed,
    errors,
    finish,
    names,
    print_json,
    print_table,
    resumable,
    settings_of,
    suggest,
    tell_left_out,
)

if TYPE_CHECKING:
    from optcov.bundle import Bundle
    from optcov.fitting.fit import FitPlan

FIRST_SCREEN = (
    "out",
    "heads",
    "kind",
    "images",
    "measure_images",
    "evaluations",
    "flip",
    "empty_class",
    "overwrite",
    "json",
)


def command(
    context: typer.Context,
    source: Path = typer.Argument(
        help="A diffusers pipeline or UNet2DModel on disk, a bundle, or an `optcov train` run."
    ),
    data: str = typer.Argument(
        help="Images from its training set: a directory, npz/npy, hf:NAME; captions in a metadata.csv."
    ),
    out: Path = typer.Option(..., help="Directory of the bundle to write."),
    heads: str = typer.Option(
        "sn,npr", help="Heads to fit. none: only statistics per timestep, and the spectrum for Spectral-DDPM."
    ),
    kind: str = typer.Option(
        "auto",
        help="auto: timed, or conv with --paper-exact. deep: hidden layers, for a lower bound. residual: by AdamW.",
    ),
    images: int = typer.Option(4096, min=1, help="Images that the heads are fitted on."),
    paper_exact: bool = typer.Option(
        False, help="Fit as the paper does: squared error, linear output; residual heads with dropout."
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
        help="Choose the best checkpoint of residual heads by this many samples. 0: take the last.",
    ),
    score_steps: int = typer.Option(50, help="Reverse steps of the samples for the score."),
    score_features: str = typer.Option(
        "fashion", help="Features for the score: fashion, lite0, inception, inception:pytorch-fid or inception:FILE."
    ),
    times: int = typer.Option(100, min=0, help="Measure the statistics at this many timesteps. 0: at all timesteps."),
    measure_images: int = typer.Option(
        96, min=0, help="Images measured at each timestep. 0: use those of the fit, and measure no spectra."
    ),
    calibration_samples: int = typer.Option(2048, min=0, help="Held-out samples for the calibration; 0 for none."),
    evaluations: int = typer.Option(
        0, min=0, help="Network evaluations in all: scales the numbers of images. 0: no scaling."
    ),
    half: bool = typer.Option(False, help="Round the network to float16 before the fit, to halve the bundle."),
    flip: bool = typer.Option(False, help="Mirror images at random, if the network was trained so."),
    schedule: str | None = typer.Option(
        None,
        help="Schedule of a UNet2DModel without a scheduler: vp_sde, linear or cosine. Default: diffusers' linear one.",
    ),
    empty_class: int | None = typer.Option(
        None, min=0, help='Number of the class that means "no class". Bundles and optcov train runs store it.'
    ),
    empty_share: float = typer.Option(0.1, help="Share of images fitted without their label, for guidance."),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of times and noise."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Replace a bundle, or an unfinished fit with other settings."
    ),
    json: bool = typer.Option(False, "--json", help="Print the bundle's description as JSON, as optcov info does."),
) -> None:
    """Fit heads on a trained network, and measure the statistics per timestep."""
    from optcov.bundle import Bundle
    from optcov.bundle.description import describe
    from optcov.fitting.fit import FitPlan
    from optcov.fitting.fit_run import FitRun
    from optcov.fitting.latents import unless_refused
    from optcov.fitting.settings import FitSettings
    from optcov.processes import this_process

    settings = settings_of(FitSettings, context)
    Bundle.check_target(out)
    cache = out.with_name(f"{out.name}.latents")  # of models of latents; it goes with the end of the fit
    chosen = [] if heads == "none" else names(heads)
    with unless_refused(cache):
        plan = FitPlan(source, data, chosen, settings, schedule, cache=cache)
        tell_left_out(plan.bundle)
        run = FitRun(out, plan.identity, overwrite)
    if run.finished:
        shutil.rmtree(cache, ignore_errors=True)
        announce(f"{out} is this very fit already: nothing to do (--overwrite fits it again)")
        run.clean()
    else:
        announce(f"{'goes on with the fit that was stopped: ' if run.resumes else ''}{plan}, and writes {out}")
        announce(str(plan.estimate()))
        with resumable(run.work):
            bundle = run.write(plan)
            if this_process().is_main_process:
                shutil.rmtree(cache, ignore_errors=True)
        _tell(plan, bundle)
    if not this_process().is_main_process:
        return
    if json:
        print_json(describe(str(out)))
        return
    sample = ("optcov", "sample", str(out))
    suggest(*sample) if run.finished else finish(out, *sample)


def _tell(plan: FitPlan, bundle: Bundle) -> None:
    """Show how the fit went, on standard error."""
    rows = [
        (name, len(report.losses), f"{report.losses[-1]:.4f}", "yes" if report.converged else "no")
        for name, report in plan.reports.items()
    ]
    if rows:
        print_table("closed-form fit", ("head", "passes", "loss per pixel", "converged"), rows, errors)
    for name, report in plan.reports.items():
        if not report.converged:
            settled = f"{name} has not settled after {len(report.losses)} passes"
            announce(f"{settled}; take it if its calibration on held-out images is near 1, or else fit on more images")
    for name, error in plan.interpolation_errors.items():
        announce(f"{name}: interpolation error about {error:.1g}")
    for name, found in bundle.provenance.get("calibration", {}).items():
        columns = zip(found["edges"][:-1], found["edges"][1:], found["ratio"], found["error"], strict=True)
        lines = [(f"{low:.4g}..{high:.4g}", f"{ratio:.3f}", f"{error:.3f}") for low, high, ratio, error in columns]
        title = f"calibration of the head {name} on held-out images"
        print_table(title, ("t", "predicted / measured", "error"), lines, errors)
