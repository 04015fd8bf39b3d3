"""What clipping x0_hat costs: distances of samples by three conventions, from the same noise.

    python benchmarks/clipping.py [BUNDLE] [--reference DATA] [--samples 500] [--json FILE]

paper        x0_hat is clipped; DDIM's process keeps the predicted noise beside it (the paper's rows)
re-derived   x0_hat is clipped, and the noise is derived from it again
not clipped  x0_hat is clipped in the last step alone; variances are bounded all the same
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from optcov import bundle, data
from optcov.bundle import Bundle, Sampler
from optcov.metrics import Distance, Extractor, find_extractor, measure_frechet
from optcov.metrics.frechet import jackknife_error

METHODS = ("DDIM", "NPR-DDIM", "SN-DDIM", "DDPM, beta-tilde", "NPR-DDPM", "SN-DDPM")
CONVENTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "re-derived": {"use_clipped_model_output": True},
    "not clipped": {"clip_mean": False},
}
BATCH = 100


def distance(sampler: Sampler, samples: int, extractor: Extractor, reference: torch.Tensor) -> Distance:
    """Of so many images of a sampler from the reference's features."""
    parts = []
    for first in range(0, samples, BATCH):
        drawn = sampler.draw(range(first, min(first + BATCH, samples))).x_0.cpu()
        parts.append(extractor.features(data.ImageSet(data.to_8bit(drawn))))
    return measure_frechet(torch.cat(parts), reference, mix=False)


def row(model: Bundle, method: str, steps: int, samples: int, extractor: Extractor, reference: torch.Tensor) -> dict:
    """Distances by convention, and differences from the paper's with paired standard errors."""
    found: dict[str, Any] = {"method": method, "steps": steps}
    paper: Distance | None = None
    for name, options in CONVENTIONS.items():
        if name == "re-derived" and not method.endswith("DDIM"):
            continue  # which DDPM's process does in any case
        one = distance(Sampler(model, method, steps, **options), samples, extractor, reference)
        found[name] = {"distance": one.limit, "standard_error": one.standard_error}
        paper = paper or one
        if one is not paper:
            assert one.limit is not None
            assert paper.limit is not None
            pairs = [
                [ours - theirs for ours, theirs in zip(*sides, strict=True)]
                for sides in zip(one.replicates, paper.replicates, strict=True)
            ]
            found[name] |= {"difference": one.limit - paper.limit, "paired_error": jackknife_error(pairs)}
    return found


def main() -> None:
    """Print a line per method and number of steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?", default="fashion")
    parser.add_argument("--reference", default="data/fashion-mnist", help="images, whose test part is compared with")
    parser.add_argument("--schedule", default="linear")
    parser.add_argument("--features", default="fashion")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--steps", default="10,25")
    parser.add_argument("--methods", default=";".join(METHODS))
    parser.add_argument("--json", type=Path, help="append each row to this file")
    options = parser.parse_args()
    model, extractor = bundle.load(options.bundle, options.schedule), find_extractor(options.features)
    reference = extractor.features(data.load(options.reference, "test"))
    for steps in map(int, options.steps.split(",")):
        for method in options.methods.split(";"):
            found = row(model, method, steps, options.samples, extractor, reference)
            print(found, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
