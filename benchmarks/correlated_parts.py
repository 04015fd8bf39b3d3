"""What the gain of correlated NPR is made of: bits/dim of the transitions, paired by image and noise.

    python benchmarks/correlated_parts.py [--bundle fashion] [--data DATA] [--images 64] [--steps 10 25] [--record FILE]

exact       lam2 I + gamma^2 D^1/2 C D^1/2, a dense matrix per image: what the fast form (optcov.gaussian.Correlated),
            whose density is exact in O(d log d), leaves of it; for grey images, as it takes too long for larger ones
colours     correlations between channels alone: each mixture of channels has the same power in all frequencies
positions   correlations between positions alone: channels are not mixed
share       of lam2 in the variances of the steps: the noise of the forward process, which is not correlated

Test images that no fit has seen: those that come with the model, or those of DATA.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import final

import torch
from torch import Tensor

import optcov
from optcov import Trajectory
from optcov.bundle import Bundle, test_set
from optcov.covariances import Covariance, Residual, Spectrum
from optcov.covariances.correlated import CorrelatedResidual
from optcov.data import ImageSet, load
from optcov.gaussian import Basis, Diagonal, Full
from optcov.likelihood.terms import observe, seeded_noise, transition_cost
from optcov.prediction import Prediction
from optcov.schedule import Time

BATCH = 8
BOTH = ("npr", "fast")  # of which the others are compared


@final
class Exact(Covariance):
    """D^1/2 C D^1/2 as a dense matrix, (B, d, d)."""

    structure = "matrix"
    head = "npr"

    def __init__(self, spectrum: Spectrum):
        self.powers = spectrum

    def second_moment(self, prediction: Prediction) -> Full:
        variance = Residual().second_moment(prediction)
        assert isinstance(variance, Diagonal)
        std = variance.variance.flatten(1).double().sqrt()
        size = std.shape[1]
        units = torch.eye(size, dtype=torch.float64).reshape(size, *prediction.x_t.shape[1:])
        power = self.powers.power(prediction.t, prediction.x_t).double().flatten(1)[0]
        rows = self.powers.basis.transform(units).flatten(1)  # row i: B e_i
        correlation = (rows * power) @ rows.mT
        return Full(std[:, :, None] * correlation / power.mean() * std[:, None, :])


def colours_alone(spectrum: Spectrum) -> Spectrum:
    """The same mean power of each mixture of channels, flat over the frequencies."""

    def at(t: Time) -> Tensor:
        power = spectrum.at(t)
        return power.mean((-2, -1), keepdim=True).expand_as(power)

    return Spectrum(at, spectrum.basis)


def positions_alone(spectrum: Spectrum) -> Spectrum:
    """The power of each frequency in each channel of the image, as if channels were independent."""
    mixture = spectrum.basis.channels
    assert mixture is not None
    shares = mixture.double().square()
    return Spectrum(lambda t: torch.einsum("ca,...chw->...ahw", shares.to(spectrum.at(t)), spectrum.at(t)), Basis())


def covariances(bundle: Bundle) -> dict[str, Covariance]:
    """The forms that images of this shape can have, by name."""
    spectrum = bundle.spectrum("npr")
    if spectrum.basis.channels is None:
        return {"exact": Exact(spectrum)}
    parts = {"colours": colours_alone(spectrum), "positions": positions_alone(spectrum)}
    return {name: CorrelatedResidual(part) for name, part in parts.items()}


@torch.no_grad()
def costs(bundle: Bundle, images: ImageSet, trajectory: Trajectory) -> dict[str, Tensor]:
    """Bits/dim of all transitions by form, (images,), and the share of lam2."""
    forms = {"npr": bundle.reverse_process("NPR-DDPM"), "fast": bundle.reverse_process("CNPR-DDPM")}
    forms |= {name: bundle.reverse_process("CNPR-DDPM", covariance=c) for name, c in covariances(bundle).items()}
    found: dict[str, list[Tensor]] = {name: [] for name in (*forms, "share of lam2")}
    size = math.prod(bundle.image_shape)
    for index in torch.arange(len(images)).split(BATCH):
        x_0 = images.x_0(index)
        noise = seeded_noise(bundle.schedule, 0, index.tolist(), x_0.shape[1:], x_0.dtype)
        told = {"class_labels": torch.as_tensor(images.labels)[index].long()} if bundle.classes else {}
        sums = {name: torch.zeros(len(index), dtype=torch.float64) for name in found}
        for t, s in trajectory.descending():
            if s > 0:
                seen = observe(forms["npr"], x_0, t, noise(t), told)
                for name, process in forms.items():
                    sums[name] += transition_cost(process, seen, s) / (size * math.log(2))
                own = forms["npr"].forward.bridge(t, s).variance
                shares = own / forms["npr"].step_from(seen.prediction, s).variance
                sums["share of lam2"] += shares.flatten(1).mean(1) / (len(trajectory) - 1)
        for name, total in sums.items():
            found[name].append(total)
    return {name: torch.cat(parts) for name, parts in found.items()}


def paired(first: Tensor, second: Tensor) -> dict[str, float]:
    """Mean of the difference, and its standard error."""
    gap = first - second
    return {"mean": round(float(gap.mean()), 4), "standard_error": round(float(gap.std() / len(gap) ** 0.5), 4)}


def main() -> None:
    """Print a line per number of steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", default="fashion")
    parser.add_argument("--data", help="images, whose test part is scored; by default those that come with the model")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 25])
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    bundle = optcov.load(options.bundle, schedule="linear")
    images = test_set(options.bundle) if options.data is None else load(options.data, "test")
    images = images.select(slice(options.images))
    lines = []
    for K in options.steps:
        bits = costs(bundle, images, Trajectory.even(bundle.schedule, K))
        line = {
            "bundle": bundle.name,
            "model": bundle.on_its_own_schedule().digest()[:12],
            "steps": K,
            "images": len(images),
            "share of lam2": round(float(bits.pop("share of lam2").mean()), 4),
            "npr": round(float(bits["npr"].mean()), 4),
            **{f"{name} less npr": paired(found, bits["npr"]) for name, found in bits.items() if name != "npr"},
            **{f"{name} less fast": paired(found, bits["fast"]) for name, found in bits.items() if name not in BOTH},
        }
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
    if options.record:
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
