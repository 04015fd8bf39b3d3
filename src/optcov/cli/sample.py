"""`optcov sample`: draw images by any method, resumable; also pictures that compare methods or show uncertainty.

Under `accelerate launch -m optcov sample ...` each process draws a share of the images that are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from optcov.console import (
    announce,
    check_out,
    check_seed,
    default_out,
    errors,
    finish,
    numbers,
    print_json,
    resumable,
    was_given,
)
from optcov.progress import track
from optcov.text_table import printable

if TYPE_CHECKING:
    from optcov.bundle import Bundle, Sampler

COMPARED = "DDPM, beta-tilde;DDPM, beta;DDIM;A-DDIM;NPR-DDIM;SN-DDIM;Bridge 2M"
COMPARED_STEPS = (5, 10, 25, 50)
IN_GRID, IN_PICTURE = 64, 16  # how many images a grid, and a picture with several panels, show at most
MAX_IMAGES = 2**32  # beyond, the noise of images would repeat
LABEL_BYTES = 32  # that the label of an image takes while labels are made
ROW = 8  # images of a row of the grid, and of a class
FIRST_SCREEN = ("out", "method", "steps", "n", "seed", "classes", "guidance", "compare", "variance_map", "json")


# options of images one by one, which the picture of --compare does not take
ONE_BY_ONE = (
    *("--method", "--steps", "--trajectory", "--batch-size", "--format", "--noise-cap", "--last-step", "--tolerance"),
    *("--ocm-probes", "--no-clip", "--variance-map"),
)
INSTEAD = {"--method": "--methods", "--steps": "--compare-steps"}
OF_COMPARE = ("--methods", "--compare-steps")


def command(
    context: typer.Context,
    bundle: str = typer.Argument("fashion", help="A bundle: an embedded model's name, or a directory."),
    out: Path | None = typer.Option(
        None,
        callback=check_out,
        help="Directory for the images; with --compare the picture. By default a place in out/.",
    ),
    method: str | None = typer.Option(
        None,
        help="A method listed above. By default Bridge 2M; with --variance-map a method with a head, such as NPR-DDIM.",
        show_default=False,
    ),
    steps: int = typer.Option(10, min=1, help="Number of reverse steps K."),
    n: int | None = typer.Option(
        None, "--n", help="Number of images; by default 64, or a row of 8 for each class.", show_default=False
    ),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of the noise. Each image gets its own noise."),
    classes: list[str] | None = typer.Option(
        None,
        "--class",
        help='Draw this class; "none" is no class. May be repeated. By default each class gets a row.',
        show_default=False,
    ),
    guidance: float = typer.Option(1.0, help="Weight of classifier-free guidance. 1: none."),
    trajectory: str = typer.Option("even", help="Times: even, quadratic, karras or optimal."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    batch_size: int = typer.Option(64, help="Images drawn at once. It does not change the images."),
    file_format: str = typer.Option("png", "--format", help="png: a file per image; npz: a file per batch."),
    noise_cap: float | None = typer.Option(
        None, help="The paper's y in 8-bit levels. By default the bundle's. 0: none."
    ),
    last_step: str = typer.Option("mean", help="What the last step gives: its mean, or a draw."),
    tolerance: float = typer.Option(0.05, help="Relative tolerance of Gotta Go Fast, which chooses its own steps."),
    ocm_probes: int | None = typer.Option(
        None, help="OCM-DDPM, OCM-DDIM: probes of the Jacobian per step, instead of a fitted head."
    ),
    no_clip: bool = typer.Option(False, "--no-clip", help="Clip x0_hat in the last step only; see docs/clipping.md."),
    compare: bool = typer.Option(
        False, "--compare", help="One picture: methods as rows, steps as columns, same noise."
    ),
    methods: str = typer.Option(COMPARED, help="Methods of --compare, separated by semicolons."),
    steps_list: str | None = typer.Option(
        None, "--compare-steps", help="Numbers of steps of --compare; by default 5,10,25,50, as far as there are times."
    ),
    variance_map: bool = typer.Option(False, "--variance-map", help="Show the standard deviation beside each image."),
    json: bool = typer.Option(False, "--json", help="Print what was done as JSON."),
) -> None:
    """Draw images by any method: of the paper, of this package, or a diffusers scheduler.

    In discrete time: DDPM, beta-tilde; DDPM, beta; A-DDPM; NPR-DDPM; SN-DDPM; DDIM; A-DDIM; NPR-DDIM; SN-DDIM;
    OCM-DDPM; OCM-DDIM; Spectral-DDPM; Spectral-DDIM; CNPR-DDPM; CNPR-DDIM; CSN-DDPM; CSN-DDIM; Improved DDPM.

    In continuous time: Euler-Maruyama; Ancestral sampling; Probability flow; A-DPM; NPR-DPM; SN-DPM; Gotta Go Fast.

    In few steps: Bridge 2M. If the bundle has matched noise: Matched 2M.

    diffusers: DPM-Solver++; SDE-DPM-Solver++; UniPC; DPM-Solver++, Karras times; UniPC, Karras times; DDPM (diffusers);
    DDIM (diffusers).
    """
    from optcov import bundle as bundles
    from optcov.bundle.conditions import labels_in_rows
    from optcov.bundle.recommendation import head_method
    from optcov.data.images import require_memory
    from optcov.methods import DEFAULT_METHOD, HEAD_METHOD, find_method
    from optcov.processes import this_process

    if (n is not None and n < 1) or batch_size < 1:
        raise ValueError(f"--n {n} and --batch-size {batch_size} must be positive")
    if n is not None and n > MAX_IMAGES:
        raise ValueError(f"--n {n} is more than the {MAX_IMAGES} images that have noise of their own; draw fewer")
    _check_options(context, compare)
    state = this_process()
    model = bundles.load(bundle, schedule)
    model.network.to(state.device)
    if method is None:
        method = head_method(model) if variance_map else DEFAULT_METHOD
    labels = _labels(model, classes)
    n = _shown(labels) if n is None else n
    require_memory(LABEL_BYTES * n if labels else 0, f"--n {n} with classes")
    if compare:
        count = min(n, IN_PICTURE)
        told = {"condition": labels_in_rows(labels, count), "guidance": guidance}
        done = _compare(model, out, methods, steps_list, count, seed, told)
        if json:
            print_json(done)
        else:
            finish(Path(done["picture"]), "optcov", "sample", bundle, "--variance-map")
        return
    for option, given in (("--no-clip", no_clip), ("--ocm-probes", ocm_probes is not None)):
        if given and find_method(method).covariance is None:
            raise ValueError(
                f"{option} needs a method with a covariance, and {find_method(method).name} has none; leave it out, or "
                f"choose another, such as --method {HEAD_METHOD}"
            )
    options: dict[str, Any] = {"noise_cap": noise_cap, "last_step": last_step, "tolerance": tolerance}
    options |= {"condition": labels_in_rows(labels, n, ROW), "guidance": guidance}
    options |= {"ocm_probes": ocm_probes, "clip_mean": False if no_clip else None}
    sampler = bundles.Sampler(model, method, steps, seed, trajectory=trajectory, **options)
    out = out or default_out(model.name, method, str(steps), *_words(classes, guidance))
    times = f" ({trajectory})" if sampler.process else ""
    caption = printable(f"{model.name}: {sampler.title}{times}, seed {seed}")
    if variance_map:
        require_variance(sampler)
    announce(f"{caption}: draws {n} images to {out}; those that are there stay")
    with resumable(out):
        done = _sample(sampler, caption, out, n, batch_size, file_format, labels)
    if not state.is_main_process:
        return
    if variance_map:
        done["variance_map"] = str(out / "variance.png")
        _variance_map(sampler, out / "variance.png", min(n, IN_PICTURE))
    if json:
        print_json(done)
        return
    _tell(done, sampler)
    finish(out / ("variance.png" if variance_map else "grid.png"), "optcov", "sample", bundle, "--compare")


def _check_options(context: typer.Context, compare: bool) -> None:
    """Refuse what the picture of --compare does not take, or takes alone."""
    for option in ONE_BY_ONE if compare else OF_COMPARE:
        if was_given(context, option):
            if not compare:
                raise ValueError(f"{option} needs --compare; add it, or leave {option} out")
            remedy = f"use {INSTEAD[option]}" if option in INSTEAD else "leave it out"
            raise ValueError(f"--compare does not take {option}; {remedy}")


def _labels(model: Bundle, classes: list[str] | None) -> list[int]:
    """The classes that images take in turn: those asked for, or all; nothing for a bundle without classes."""
    if classes and model.classes is None:
        raise ValueError(f"{model.name} knows no classes; leave --class out")
    empty, known = model.empty_condition.get("class_labels"), model.class_numbers
    found = []
    for text in classes or []:
        if text == "none" and empty is not None:
            found.append(int(empty))
        elif text.isdecimal() and len(text) < 10 and int(text) in known:
            found.append(int(text))
        else:
            none = "" if empty is None else ", and none for no class"
            raise ValueError(f"--class {text!r} is no class of {model.name}; they are {known[0]} to {known[-1]}{none}")
    return found or known


def _shown(labels: list[int]) -> int:
    """How many images a grid shows at most: a row for each class, as far as they can be looked at."""
    return max(IN_GRID, ROW * min(len(labels), IN_GRID))


def _words(classes: list[str] | None, guidance: float) -> list[str]:
    """What distinguishes the output of these options in the name of its directory."""
    chosen = [f"class-{'-'.join(classes)}"] if classes else []
    return [*chosen, *([] if guidance == 1 else [f"guidance-{guidance:g}"])]


def require_variance(sampler: Sampler) -> None:
    """Refuse methods that say nothing of the variance of x_0, or nothing that differs between pixels."""
    from optcov.covariances import find_covariance
    from optcov.methods import HEAD_METHOD

    said = {
        "range": "estimates no variance of x_0",
        "point": "takes the variance of x_0 to be 0, so that there is nothing to show",
        "isotropic": "takes the variance of x_0 to be the same for every pixel and image, so that there is nothing to "
        "show",
    }
    name = sampler.method.covariance or "range"
    structure = "point" if name == "beta_tilde" else find_covariance(name).structure
    if structure in said:
        raise ValueError(f"{sampler.method.name} {said[structure]}; choose a method such as {HEAD_METHOD}")


def _sample(
    sampler: Sampler, caption: str, out: Path, n: int, batch_size: int, file_format: str, labels: list[int]
) -> dict[str, Any]:
    """Draw what is missing of the first n images, show them, and say what was done."""
    from optcov.bundle.drawing import draw_to
    from optcov.bundle.pictures import draw_grid
    from optcov.processes import this_process

    rule = {"labels": labels, "images of a row": ROW} if labels else None
    done = draw_to(sampler, out, n, batch_size, file_format, rule)
    if this_process().is_main_process:
        draw_grid(done.directory.first(min(n, _shown(labels))), out / "grid.png", caption, ROW)
    clamps = sampler.process.bounds if sampler.process else None
    return {
        "directory": str(out),
        "grid": str(out / "grid.png"),
        "images": n,
        "drawn": done.drawn,
        "evaluations": done.evaluations,
        "settings": done.settings,
        "clamped": {"below": clamps.below, "above": clamps.above, "of": clamps.total} if clamps else None,
    }


def _tell(done: dict[str, Any], sampler: Sampler) -> None:
    from optcov.covariances import clamped_in_words

    clamped = done["clamped"]
    if clamped and clamped["below"]:
        covariance = str(sampler.method.covariance)
        below, above = (clamped[side] / clamped["of"] for side in ("below", "above"))
        errors.print(clamped_in_words(covariance, below, above), highlight=False, soft_wrap=True)
    drawn, evaluations = done["drawn"], done["evaluations"]
    cost = "" if evaluations is None else f", {evaluations:.4g} network evaluations each"
    errors.print(f"{drawn} images drawn{cost}; {done['images'] - drawn} were there already", highlight=False)


def _compare(
    model: Bundle, out: Path | None, methods: str, steps: str | None, count: int, seed: int, told: dict[str, Any]
) -> dict[str, Any]:
    """Draw the picture of methods against steps, and say what is in it."""
    from optcov.bundle.pictures import compare, draw_comparison

    most = model.schedule.grid_size if model.schedule.discrete else max(COMPARED_STEPS)
    usual = [K for K in COMPARED_STEPS if most >= K] or [most]
    columns = usual if steps is None else numbers(steps, "--compare-steps", "5,10,25")
    rows = [name.strip() for name in methods.split(";")]
    chosen = out or default_out(model.name, "compare.png")
    picture = chosen if chosen.suffix == ".png" else chosen / "compare.png"
    cells = compare(model, rows, columns, count, seed, **told)
    shown = ",".join(map(str, columns))
    announce(f"{model.name}: {methods} in {shown} steps from the same noise, as one picture to {picture}")
    tracked = track(cells, len(rows) * len(columns), "methods and steps", "cells")
    draw_comparison(list(tracked), picture, printable(f"{model.name}: the same noise by every method"))
    return {"picture": str(picture), "methods": rows, "steps": columns}


def _variance_map(sampler: Sampler, path: Path, count: int) -> None:
    from optcov.bundle.pictures import clean_deviation, draw_deviations
    from optcov.data import to_8bit
    from optcov.reverse import Step

    assert sampler.process is not None
    assert sampler.trajectory is not None
    middle = sampler.trajectory.times[len(sampler.trajectory) // 2]
    seen: list[Any] = []

    def remember(step: Step) -> None:
        if step.t == middle:
            seen.append(step.x_t)

    images = to_8bit(sampler.bundle.as_images(sampler.draw(range(count), callback=remember).x_0)).cpu()
    told = sampler.condition_of(range(count), seen[0].device)
    deviations = clean_deviation(sampler.process, seen[0], middle, **told)
    draw_deviations(
        images, deviations, path, f"{sampler.method.name}: standard deviation of x_0 given x_t at t = {middle}"
    )
