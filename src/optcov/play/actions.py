"""What the buttons of the page do: plain functions from a bundle and a visitor's choices to pictures and numbers.

A choice that does not fit is a ValueError of one sentence.
"""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from optcov.bundle import Bundle, Sampler
from optcov.bundle.matched import prepared
from optcov.bundle.pictures import show
from optcov.canvas import new_figure, png
from optcov.covariances import Covariance
from optcov.data import from_8bit, grid, to_8bit
from optcov.forward import ForwardProcess
from optcov.inverse import Mask, restore
from optcov.methods import FEW_STEP_METHODS, METHODS, PEER_METHODS, Method, find_method
from optcov.noise import batch_noise
from optcov.play.inputs import (
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_SEED,
    MAX_STEPS,
    MIN_STEPS,
    Drawing,
    background_pixels,
    choice,
    condition,
    drawn_pixels,
    enlarged,
    erased_pixels,
    number,
    whole,
)
from optcov.reverse import Step

SHOWN = 7  # points of a path at most, besides its end
LEAST_NOISE, MOST_NOISE = 1, 99  # percent
MAX_CLASSES = 20  # whose probabilities are found: each costs as many evaluations as a bound
SHEET = 640  # pixels that the longer side of a sheet of samples has at most, where the samples have fewer
NOISELESS = 0.0  # what is not erased is known


def sampling_methods(bundle: Bundle) -> list[str]:
    """Methods that the bundle can run in a number of steps that one chooses."""
    known = (*METHODS.values(), *FEW_STEP_METHODS.values(), *PEER_METHODS.values())
    return [method.name for method in known if not method.adaptive and _runs(bundle, method)]


def path_methods(bundle: Bundle) -> list[str]:
    """Those that step by a reverse process, whose path can be followed."""
    return [name for name in sampling_methods(bundle) if find_method(name).covariance is not None]


def bound_methods(bundle: Bundle) -> list[str]:
    """Those with a finite bound."""
    rows = [find_method(name) for name in path_methods(bundle)]
    return [r.name for r in rows if r.eta == 1 and not r.continuous]


def restoring_methods(bundle: Bundle) -> list[str]:
    """Those whose covariance lets a measurement move x_0."""
    rows = [find_method(name) for name in path_methods(bundle)]
    return [r.name for r in rows if r.eta == 1 and not r.continuous and _says_more_than_a_point(_covariance(r))]


def covariances(bundle: Bundle) -> list[str]:
    """Covariances of x_0 that can be shown; those that differ between pixels first."""
    rows = [find_method(name) for name in restoring_methods(bundle)]
    kinds = sorted((_covariance(row) for row in rows), key=lambda kind: kind.structure == "isotropic")
    return list(dict.fromkeys(kind.name for kind in kinds))


def preferred(names: list[str], *wanted: str) -> str | None:
    """The first of the wanted names that there is, or else the first of all."""
    return next((name for name in wanted if name in names), names[0] if names else None)


def compare(
    bundle: Bundle, first: Any, second: Any, steps: Any, count: Any, seed: Any, label: Any = None, guidance: Any = 1.0
) -> tuple[Image.Image, Image.Image]:
    """Samples of two methods from the same noise."""
    known, total = sampling_methods(bundle), whole("the number of images", count, 1, MAX_IMAGES)
    samplers = [
        _sampler(bundle, choice("method", name, known), steps, seed, label, guidance, total) for name in (first, second)
    ]
    columns = math.ceil(total**0.5)
    left, right = (_sheet(bundle, s.draw(range(total)).x_0, columns) for s in samplers)
    return left, right


def denoising_path(
    bundle: Bundle, method: Any, steps: Any, seed: Any, label: Any = None, guidance: Any = 1.0
) -> Image.Image:
    """x_t and the image predicted from it along one path, as a strip."""
    sampler = _sampler(bundle, choice("method", method, path_methods(bundle)), steps, seed, label, guidance, 1)
    process, path = sampler.process, sampler.trajectory
    assert process is not None
    assert path is not None
    shown = {round(k * (len(path) - 1) / (min(SHOWN, len(path)) - 1)) for k in range(min(SHOWN, len(path)))}
    points: list[tuple[float, Tensor, Tensor]] = []
    seen = 0

    def note(step: Step) -> None:
        nonlocal seen
        if seen in shown:
            with torch.no_grad():
                clean = process.predict(step.x_t, step.t, **sampler.condition_of([0], bundle.device)).clean
            points.append((step.t, step.x_t[0].cpu(), process.bounds.clip(clean)[0].cpu()))
        seen += 1

    result = sampler.draw([0], callback=note).x_0[0].cpu()
    points.append((0.0, result, result))
    return _strip([(t, _pixels(bundle, x_t / _spread(x_t)), _pixels(bundle, x)) for t, x_t, x in points])


def uncertainty(
    bundle: Bundle, drawing: Drawing | None, percent: Any, covariance: Any, seed: Any, label: Any = None
) -> Image.Image:
    """An image, the same with noise, and what the bundle says of it: mean and standard deviation of each pixel."""
    name = choice("covariance", covariance, covariances(bundle))
    share = number("the share of noise", percent, LEAST_NOISE, MOST_NOISE) / 100
    start = whole("seed", seed, 0, MAX_SEED)
    told: dict[str, Any] = {key: value.to(bundle.device) for key, value in condition(bundle, label).items()}
    pixels = drawn_pixels(drawing, bundle.picture_shape)
    t = _time_of(bundle, share)
    noise = batch_noise(start, [0], 0, bundle.image_shape)
    x_t = ForwardProcess(bundle.schedule).diffuse(_data(bundle, pixels), t, noise).to(bundle.device)
    known = bundle.posterior(x_t, t, name, **told)
    deviation = known.variance.expand_as(known.mean).sqrt()[0].mean(0).cpu()
    noisy, mean = _pixels(bundle, x_t[0] / float(bundle.schedule.unit_data_std(t))), _pixels(bundle, known.mean[0])
    return _panels({"image": pixels, f"with {share:.0%} noise": noisy, "mean": mean}, {"standard deviation": deviation})


def score(
    bundle: Bundle, drawing: Drawing | None, steps: Any, seed: Any, label: Any = None
) -> tuple[list[tuple[str, float]], dict[str, float]]:
    """Bits/dim of an image by method, the least first, and the probability of each class if there are a few.

    Latents have nats per latent dimension instead.
    """
    count, start = whole("steps", steps, MIN_STEPS, MAX_STEPS), whole("seed", seed, 0, MAX_SEED)
    image = drawn_pixels(drawing, bundle.picture_shape).unsqueeze(0)
    told = condition(bundle, label)
    names = bound_methods(bundle)
    options: dict[str, Any] = {"seed": start, "progress": False}
    found = bundle.bits_per_dim(image, count, methods=names, condition=told or None, **options)
    rows = [(name, found.of(_covariance(find_method(name)).name, count).mean) for name in names]
    if bundle.classes is None or len(bundle.class_numbers) > MAX_CLASSES:
        return sorted(rows, key=lambda row: row[1]), {}
    chances = bundle.class_log_probabilities(image, count, **options)[0].exp()
    named = {f"class {c}": float(p) for c, p in zip(bundle.class_numbers, chances, strict=True)}
    return sorted(rows, key=lambda row: row[1]), named


def restoration(
    bundle: Bundle, drawing: Drawing | None, method: Any, steps: Any, count: Any, seed: Any, label: Any = None
) -> tuple[Image.Image, Image.Image]:
    """What is left of an image with mean and deviation of what was erased, and samples of it."""
    name = choice("method", method, restoring_methods(bundle))
    total, start = whole("the number of samples", count, 2, MAX_IMAGES), whole("seed", seed, 0, MAX_SEED)
    length = whole("steps", steps, MIN_STEPS, MAX_STEPS)
    pixels, hidden = background_pixels(drawing, bundle.picture_shape), erased_pixels(drawing, bundle.picture_shape)
    mask = Mask((~erased_pixels(drawing, bundle.image_shape)).float(), bundle.image_shape)
    left = torch.where(hidden, torch.full_like(pixels, 128), pixels)  # first, so that no latent knows what was there
    measured = mask.apply(_data(bundle, left).double())[0].float()
    found = restore(
        bundle,
        measured,
        mask,
        NOISELESS,
        steps=length,
        method=name,
        samples=total,
        seed=start,
        condition=condition(bundle, label) or None,
    )
    panels = {"what is left": left, "mean": _pixels(bundle, found.mean), "image": pixels}
    summary = _panels(panels, {"standard deviation": found.std.mean(0)}, columns=2)
    return summary, _sheet(bundle, found.samples, math.ceil(total**0.5))


def example(bundle: Bundle, number: int) -> Tensor:
    """A sample to begin with, as 8-bit pixels (C, H, W); each number has another, and the next class."""
    known = bundle.class_numbers
    label = known[number % len(known)] if known else None
    return _pixels(bundle, bundle.sample(1, steps=10, seed=number, labels=label, progress=False)[0])


def _data(bundle: Bundle, pixels: Tensor) -> Tensor:
    """8-bit pixels (C, H, W) as the network knows them, (1, ...): encoded, if it is one of latents."""
    images = from_8bit(pixels).unsqueeze(0)
    return images if bundle.decoder is None else bundle.encode(images).cpu()


def _pixels(bundle: Bundle, x: Tensor) -> Tensor:
    """An image as the network knows it (C, H, W) as 8-bit pixels: decoded, if it is one of latents."""
    return to_8bit(bundle.as_images(x.float().unsqueeze(0))[0]).cpu()


def _sheet(bundle: Bundle, x_0: Tensor, columns: int) -> Image.Image:
    pixels = torch.stack([_pixels(bundle, x) for x in x_0])  # one by one: decoders take much memory
    return enlarged(grid(pixels, columns), SHEET)


def _runs(bundle: Bundle, method: Method) -> bool:
    if method.continuous and bundle.schedule.discrete:
        return False
    if method.solver == "matched":
        return bool(prepared(bundle.matched, bundle.schedule))
    try:
        Sampler(bundle, method.name, 2)
    except ValueError:  # a head or a number per time is missing, or the schedule is of another kind
        return False
    return True


def _covariance(method: Method) -> type[Covariance]:
    return Covariance.registry[method.covariance or ""]


def _says_more_than_a_point(kind: type[Covariance]) -> bool:
    return kind.has_posterior and kind.name != "beta_tilde"


def _sampler(bundle: Bundle, method: str, steps: Any, seed: Any, label: Any, guidance: Any, count: int) -> Sampler:
    told = condition(bundle, label, count)
    weight = number("guidance", guidance, 0, MAX_GUIDANCE) if told and bundle.empty_condition else 1.0
    length, start = whole("steps", steps, MIN_STEPS, MAX_STEPS), whole("seed", seed, 0, MAX_SEED)
    return Sampler(bundle, method, length, start, condition=told or None, guidance=weight)


def _time_of(bundle: Bundle, share: float) -> float:
    """The time at which noise has this share of the variance of x_t, or the nearest that the schedule has."""
    schedule = bundle.schedule
    wanted = torch.tensor(math.log1p(-share) - math.log(share), dtype=torch.float64)
    first, last = schedule.log_snr(schedule.first_time), schedule.log_snr(schedule.last_time_with_signal)
    return float(schedule.nearest(schedule.time_at(wanted.clamp(last, first)).reshape(1)))


def _spread(x_t: Tensor) -> float:
    """What brings x_t into the range of pictures: noise of a variance-exploding schedule is far outside."""
    return max(1.0, float(x_t.std()))


def _strip(points: list[tuple[float, Tensor, Tensor]]) -> Image.Image:
    figure = new_figure(1.1 * len(points) + 0.5, 2.7)
    panels = figure.subplots(2, len(points), squeeze=False)
    for column, (t, x_t, clean) in enumerate(points):
        show(panels[0][column], x_t)
        show(panels[1][column], clean)
        panels[0][column].set_title(f"t = {t:.3g}", fontsize=11)
    panels[0][0].set_ylabel("$x_t$", fontsize=12)
    panels[1][0].set_ylabel("predicted $x_0$", fontsize=12)
    return _picture(figure)


def _panels(pictures: dict[str, Tensor], maps: dict[str, Tensor], columns: int = 4) -> Image.Image:
    rows = math.ceil((len(pictures) + len(maps)) / columns)
    figure = new_figure(2.4 * columns + 0.6, 2.75 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, pixels) in zip(panels, pictures.items(), strict=False):
        show(axes, pixels)
        axes.set_title(title, fontsize=14)
    for axes, (title, values) in zip(panels[len(pictures) :], maps.items(), strict=True):
        drawn = axes.imshow(values.float().numpy(), cmap="magma", vmin=0)
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=14)
        figure.colorbar(drawn, ax=axes, shrink=0.8).ax.tick_params(labelsize=12)
    return _picture(figure)


def _picture(figure: Any) -> Image.Image:
    with Image.open(io.BytesIO(png(figure))) as picture:
        return picture.convert("RGB")
