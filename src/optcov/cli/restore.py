"""`optcov restore`: restore a damaged image, and show which parts are sure and which are a guess."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optcov.console import announce, check_out, check_seed, default_out, finish, output, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from optcov.bundle import Bundle
    from optcov.inverse import Operator

FIRST_SCREEN = ("mask", "blur", "downscale", "noise", "samples", "steps", "method", "way", "simulate", "out")
BOX = re.compile(r"box:(\d+)x(\d+)(?:\+(\d+)\+(\d+))?")


def command(
    bundle: str = typer.Argument(help="A bundle: an embedded model's name, or a directory."),
    image: str = typer.Argument(help="The damaged image, a file; or the number of a test image of the model."),
    mask: str | None = typer.Option(
        None, help="What is hidden: box:12x12, box:12x12+ROW+COLUMN, random:0.7, or an image, white where seen."
    ),
    blur: float | None = typer.Option(None, help="Standard deviation of a Gaussian blur, in pixels."),
    downscale: int | None = typer.Option(None, help="The image is smaller by this factor."),
    noise: float = typer.Option(0.05, help="Standard deviation of the noise, for images from -1 to 1. 0 is allowed."),
    samples: int = typer.Option(16, help="Number of restored images."),
    steps: int = typer.Option(50, help="Number of reverse steps K."),
    method: str | None = typer.Option(
        None, help="A method such as NPR-DDPM (default) or CNPR-DDPM; or DPS, PiGDM, DiffPIR.", show_default=False
    ),
    truth: Path | None = typer.Option(None, help="The undamaged image, for comparison."),
    simulate: bool = typer.Option(False, "--simulate", help="IMAGE is undamaged: damage it, then restore it."),
    out: Path | None = typer.Option(None, callback=check_out, help="Directory for pictures; by default in out/."),
    way: str | None = typer.Option(
        None,
        help="guidance (default) uses the network's gradient. proximal does not, and is cheaper.",
        show_default=False,
    ),
    strength: float | None = typer.Option(None, help="Strength of DPS or DiffPIR."),
    border: str | None = typer.Option(
        None, help="What lies outside a blurred image: periodic (default) or zero.", show_default=False
    ),
    seed: int = typer.Option(0, callback=check_seed, help="Seed of the noise. Each sample gets its own noise."),
    schedule: str | None = typer.Option(None, help="Use the network on another schedule: linear, cosine or vp_sde."),
    batch_size: int = typer.Option(16, help="Samples drawn at once. It does not change them."),
    json: bool = typer.Option(False, "--json", help="Print what was done as JSON."),
) -> None:
    """Restore an image that is masked, blurred, smaller or noisy: possible images, with their mean and spread.

    Several kinds of damage are applied in this order: blur, downscale, mask, noise.
    """
    from optcov import bundle as bundles
    from optcov.inverse import restore
    from optcov.inverse.arguments import check_count, check_measurement
    from optcov.inverse.conditioning import StoppingRule
    from optcov.inverse.restoring import make_guide
    from optcov.schedule import check_whole
    from optcov.storage import require_writable
    from optcov.trajectory import Trajectory

    model = bundles.load(bundle, schedule)
    operator = make_operator(tuple(model.image_shape), mask, blur, downscale, border)
    seen, known = _images(model, bundle, image, truth, simulate, operator, noise, seed)
    found_out = out or default_out(model.name, "restore", Path(image).stem, operator.name)
    # refuse before work is announced
    make_guide(model, operator, noise, method, way, strength, StoppingRule())
    for name, value in (("samples", samples), ("steps", steps), ("batch-size", batch_size)):
        check_whole(f"--{name}", value, 1)
    check_count(samples)
    check_measurement(seen, operator, noise)
    Trajectory.even(model.schedule, steps)
    require_writable(found_out / "restoration.png")
    announce(f"{model.name}: draws {samples} samples given {operator.name}, noise {noise:g}, to {found_out}")
    found = restore(
        model,
        seen,
        operator,
        noise,
        steps=steps,
        method=method,
        samples=samples,
        seed=seed,
        way=way,
        strength=strength,
        batch_size=batch_size,
        progress=True,
    )
    told = found.save(found_out, known)
    if json:
        print_json(told)
        return
    output.print(str(found), highlight=False, markup=False)
    if known is not None:
        output.print(f"PSNR of the mean: {told['psnr']:.2f} dB", highlight=False)
    finish(found_out / "restoration.png", "optcov", "sample", bundle, "--variance-map")


def make_operator(
    shape: tuple[int, ...], mask: str | None, blur: float | None, downscale: int | None, border: str | None = None
) -> Operator:
    """What the options describe: blur, then averages, then a mask."""
    from optcov.inverse import Average, Blur, Identity

    if len(shape) != 3:
        raise ValueError(f"this bundle's data has shape {shape}, not that of an image; use optcov.inverse.restore")
    parts: list[Operator] = []
    if border is not None and blur is None:
        raise ValueError("--border is for a blurred image; give --blur too, or leave it out")
    if blur is not None:
        parts.append(Blur.gaussian(shape, blur, border=border or "periodic"))
    if downscale is not None:
        parts.append(Average(shape, downscale))
    if mask is not None:
        parts.append(_mask(mask, parts[-1].measurement_shape if parts else shape))
    whole: Operator = parts[0] if parts else Identity(shape)
    for part in parts[1:]:
        whole = part @ whole
    return whole


def _mask(text: str, shape: tuple[int, ...]) -> Operator:
    from optcov.inverse import Mask

    box = BOX.fullmatch(text)
    if box:
        height, width = int(box[1]), int(box[2])
        top = int(box[3]) if box[3] else max(shape[1] - height, 0) // 2
        left = int(box[4]) if box[4] else max(shape[2] - width, 0) // 2
        return Mask.box(shape, top, left, height, width)
    if text.startswith("random:"):
        try:
            return Mask.random(shape, float(text[7:]))
        except ValueError as error:
            raise ValueError(f"--mask {text!r}: {error}; write random:0.7 to hide 70 %") from error
    if not Path(text).is_file():
        raise ValueError(f"--mask {text!r} is neither box:HxW, box:HxW+ROW+COLUMN, random:SHARE nor a file")
    return Mask(_read(Path(text), 1)[0] > 0, shape)


def _images(
    model: Bundle,
    name: str,
    image: str,
    truth: Path | None,
    simulate: bool,
    operator: Operator,
    noise: float,
    seed: int,
) -> tuple[Tensor, Tensor | None]:
    """The measurement, and the truth if it is known."""
    import torch

    from optcov.bundle import BundleError, test_images
    from optcov.inverse.arguments import check_noise

    channels = model.image_shape[0]
    check_noise(noise)
    numbered = image.isdecimal() and not Path(image).exists()
    if truth is not None and (numbered or simulate):
        raise ValueError("--truth is for a damaged image; IMAGE itself is the truth here, so leave it out")
    if numbered:
        try:
            held_out = test_images(name)
        except BundleError:
            raise ValueError(f"no held-out images come with {model.name}; give an image file instead") from None
        if int(image) >= len(held_out):
            raise ValueError(f"{name} comes with {len(held_out)} held-out images, so that there is no number {image}")
        whole: Tensor | None = held_out[int(image)]
    else:
        whole = _read(Path(image), channels) if simulate else None
    if whole is None:
        known = None if truth is None else _checked(_read(truth, channels), operator.shape, truth)
        measured = _checked(_read(Path(image), channels), operator.measurement_shape, Path(image))
        return operator.seen.to(measured) * measured, known
    whole = _checked(whole, operator.shape, Path(image))
    clean = operator.apply(whole[None])[0]
    drawn = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    return clean + noise * drawn * operator.seen.to(clean), whole


def _read(path: Path, channels: int) -> Tensor:
    """An image file in [-1, 1], (C, H, W)."""
    import torch

    from optcov.data import ImageSet, from_8bit, with_channels
    from optcov.data.folders import read_image

    pixels = torch.from_numpy(read_image(path).copy())
    return from_8bit(with_channels(ImageSet(pixels[None], None, path.name), channels).images)[0]


def _checked(image: Tensor, shape: tuple[int, ...], path: Path) -> Tensor:
    if tuple(image.shape) != tuple(shape):
        raise ValueError(f"{path} has shape {tuple(image.shape)}, but {tuple(shape)} is needed; crop or resize it")
    return image
