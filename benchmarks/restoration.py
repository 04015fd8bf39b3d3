"""Compare ways to restore images: python benchmarks/restoration.py OUT [--images 64 --samples 19 --steps 25].

Four tasks on held-out images of an embedded model, all methods with the same network, times and noise. One file per
task, method and group of images is kept in OUT, so that a stopped run goes on. DPS and DiffPIR are tuned: the best of
a few strengths, by PSNR on images that are not scored. Prints the tables of docs/restoration.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from optcov import data
from optcov.bundle import load, test_images
from optcov.inverse import Average, Blur, Mask, Operator, restore
from optcov.inverse.scores import coverage, crps, psnr

NOISE_STD = 0.05
STRENGTHS = {"DPS": (1.0, 3.0, 10.0, 30.0), "DiffPIR": (1.0, 10.0, 100.0)}
METHODS: dict[str, dict[str, Any]] = {
    "NPR, proximal": {"method": "NPR-DDPM", "way": "proximal"},
    "NPR, guidance": {"method": "NPR-DDPM", "way": "guidance"},
    "CNPR, proximal": {"method": "CNPR-DDPM", "way": "proximal"},
    "CNPR, guidance": {"method": "CNPR-DDPM", "way": "guidance"},
    "SN, proximal": {"method": "SN-DDPM", "way": "proximal"},
    "SN, guidance": {"method": "SN-DDPM", "way": "guidance"},
    "isotropic NPR, proximal": {"method": "npr_isotropic", "way": "proximal"},
    "isotropic NPR, guidance": {"method": "npr_isotropic", "way": "guidance"},
    "PiGDM's guess, proximal": {"method": "isotropic", "way": "proximal"},
    "PiGDM": {"method": "PiGDM"},
    "DPS": {"method": "DPS"},
    "DiffPIR": {"method": "DiffPIR"},
}


def tasks(shape: tuple[int, ...]) -> dict[str, Operator]:
    """The operators, by name."""
    side = shape[-1]
    box = side // 2 - side % 4 // 2
    return {
        "box": Mask.box(shape, (side - box) // 2, (side - box) // 2, box, box),
        "random 70 %": Mask.random(shape, 0.7),
        "blur 1.5": Blur.gaussian(shape, 1.5),
        "4 x smaller": Average(shape, 4),
    }


def measured(operator: Operator, images: torch.Tensor, first: int) -> torch.Tensor:
    """Measurements with noise; those of an image do not depend on its group."""
    rows = []
    for number, image in enumerate(images):
        seen = operator.apply(image[None])[0]
        noise = torch.randn(seen.shape, generator=torch.Generator().manual_seed(first + number))
        rows.append(seen + NOISE_STD * noise * operator.seen.to(seen))
    return torch.stack(rows)


def scores(samples: torch.Tensor, truth: torch.Tensor) -> dict[str, list[float]]:
    """Per image: samples and truth in 8-bit levels, as the truth is known no better."""
    drawn, known = ((x.double() * 127.5).round() / 127.5 for x in (samples, truth))
    return {
        "psnr": psnr(samples.mean(1), truth).tolist(),
        "cover50": coverage(drawn, known, 0.5).flatten(1).mean(1).tolist(),
        "cover90": coverage(drawn, known, 0.9).flatten(1).mean(1).tolist(),
        "crps": crps(samples, truth).flatten(1).mean(1).tolist(),
    }


def run(
    model: Any, operator: Operator, images: torch.Tensor, first: int, options: dict[str, Any], arguments: Any
) -> dict[str, Any]:
    """Restore a group of images and score it."""
    y = measured(operator, images, first)
    started = time.perf_counter()
    found = restore(
        model,
        y,
        operator,
        NOISE_STD,
        steps=arguments.steps,
        samples=arguments.samples,
        seed=first,
        batch_size=arguments.batch_size,
        **options,
    )
    done: dict[str, Any] = scores(found.samples, images)
    return {
        **done,
        "residual": found.residual.square().mean(1).sqrt().tolist(),
        "evaluations": found.evaluations,
        "gradients": found.gradients,
        "unsolved": found.unsolved,
        "seconds": time.perf_counter() - started,
    }


def kept(path: Path, make: Any) -> dict[str, Any]:
    """What the file holds, or what is made and written now."""
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    made: dict[str, Any] = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(made))
    scratch.replace(path)
    return made


def file_name(*words: object) -> str:
    """A file's name made of words."""
    return "-".join("".join(c if c.isalnum() else "_" for c in str(word)) for word in words) + ".json"


def tuned(model: Any, task: str, operator: Operator, name: str, images: torch.Tensor, arguments: Any) -> dict[str, Any]:
    """Options of a method; the strength of those that have one is the best on images that are not scored."""
    options = METHODS[name]
    if name not in STRENGTHS:
        return options
    last = images[-arguments.tuning :]
    found = {}
    for strength in STRENGTHS[name]:
        path = arguments.out / file_name(task, name, "strength", strength)
        trial = {**options, "strength": strength}
        result = kept(path, lambda trial=trial: run(model, operator, last, 10_000, trial, arguments))
        found[strength] = sum(result["psnr"])
    return {**options, "strength": max(found, key=lambda strength: found[strength])}


def table(rows: dict[str, dict[str, torch.Tensor]], costs: dict[str, tuple[int, int]], baselines: list[str]) -> None:
    """Print one task as Markdown: means, and differences from the baselines, paired by image."""
    beside = [name for name in baselines if name in rows]
    header = ["method", "PSNR", "50 %", "90 %", "CRPS", "passes", *(f"PSNR and 90 %, less {name}" for name in beside)]
    print(f"| {' | '.join(header)} |")
    print("|---|" + "---:|" * (5 + len(beside)))
    for name, found in rows.items():
        means = {key: float(value.mean()) for key, value in found.items()}
        cells = [
            f"{means['psnr']:.2f} ± {standard_error(found['psnr']):.2f}",
            *(f"{means[key]:.3f}" for key in ("cover50", "cover90")),
            f"{means['crps']:.4f}",
            f"{costs[name][0]} + {costs[name][1]}",
            *("" if name == other else f"{less(found, rows[other])}" for other in beside),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def standard_error(values: torch.Tensor) -> float:
    """Of a mean."""
    return float(values.std() / len(values) ** 0.5)


def less(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Differences of PSNR and of 90 % coverage with their standard errors."""
    gaps = [(found[key] - other[key], decimals) for key, decimals in (("psnr", 2), ("cover90", 3))]
    return ", ".join(f"{float(gap.mean()):+.{d}f} ± {standard_error(gap):.{d}f}" for gap, d in gaps)


def write_record(path: Path, found: Mapping[str, Any], costs: Mapping[str, tuple[int, int]], told: Any) -> None:
    """One line per task and method: its settings, and the scores of each image."""
    settings = {name: getattr(told, name) for name in ("bundle", "samples", "steps", "first")}
    lines = [
        {
            "task": task,
            "method": name,
            **settings,
            "noise": NOISE_STD,
            "passes": list(costs[name]),
            **{key: [round(float(value), 5) for value in values] for key, values in scored.items()},
        }
        for task, rows in found.items()
        for name, scored in rows.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def held_out(arguments: Any) -> torch.Tensor:
    """Test images in [-1, 1]; all of one run, in the order of the data."""
    if arguments.data is None:
        return test_images(arguments.bundle)
    wanted = arguments.first + arguments.images + arguments.tuning
    return data.load(arguments.data, "test").x_0(torch.arange(wanted))


def main() -> None:
    """Run what is missing, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bundle", default="fashion")
    parser.add_argument("--data", help="test images, such as data/cifar10.npz; by default those that come with it")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--first", type=int, default=16, help="the first image scored; those before served development")
    parser.add_argument("--tuning", type=int, default=8, help="images that strengths are chosen on")
    parser.add_argument("--samples", type=int, default=19)  # with 19 the 90 % interval ends at samples
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--group", type=int, default=8, help="images in a file")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--record", type=Path, help="a file of JSON lines for the scores of all images")
    arguments = parser.parse_args()
    model, images = load(arguments.bundle), held_out(arguments)
    if arguments.first + arguments.images + arguments.tuning > len(images):
        parser.error(f"there are only {len(images)} images")
    arguments.out = arguments.out / file_name(arguments.bundle, arguments.samples, arguments.steps)[:-5]
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    costs: dict[str, tuple[int, int]] = {}
    operators = tasks(tuple(model.image_shape))
    names = arguments.methods.split(";")
    end = arguments.first + arguments.images
    for first in range(arguments.first, end, arguments.group):  # all methods of a group, so that a stopped run compares
        group = images[first : min(first + arguments.group, end)]
        for task, operator in operators.items():
            for name in names:
                options = tuned(model, task, operator, name, images, arguments)
                chosen = [options["strength"]] if "strength" in options else []
                path = arguments.out / file_name(task, name, *chosen, first, len(group))
                result = kept(path, lambda o=operator, g=group, f=first, k=options: run(model, o, g, f, k, arguments))
                costs[name] = result["evaluations"], result["gradients"]
                rows = found.setdefault(task, {}).setdefault(name, {})
                for key in ("psnr", "cover50", "cover90", "crps", "residual"):
                    new = torch.tensor(result[key], dtype=torch.float64)
                    rows[key] = torch.cat([rows[key], new]) if key in rows else new
    for task, rows in found.items():
        print(f"\n### {task}\n")
        table(rows, costs, ["DPS", "PiGDM"])
    if arguments.record:
        write_record(arguments.record, found, costs, arguments)


if __name__ == "__main__":
    main()
