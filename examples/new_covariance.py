"""A covariance of your own, with a head of its own: the variance by the mean absolute residual.

NPR fits E[r^2 | x_t] of the residual r = eps - eps_hat. Squares of outliers make that noisy when images are few. For
Gaussian residuals E[r^2] = pi/2 E[|r|]^2, so that a head for |r| gives a variance, too, with less noise and some bias.

One class says all that the package asks: what the head is fitted on, what it means, its rows in METHODS. Fitting,
saving, sampling, the bound and diffusers' pipelines find it by its name. Run: python examples/new_covariance.py
"""

from __future__ import annotations

import math

import optcov
from optcov.bundle import test_images
from optcov.covariances import Covariance, Example, Regression, Row
from optcov.gaussian import Diagonal, per_sample
from optcov.prediction import Prediction


class AbsoluteResidual(Covariance):
    """v = pi/2 E[|r| given x_t]^2, in units of x_0."""

    name = "absolute"
    head = "absolute"
    rows = (Row("Abs-DDPM", eta=1.0, noise_cap=1.0), Row("Abs-DDIM", eta=0.0, noise_cap=1.0))

    def second_moment(self, prediction: Prediction) -> Diagonal:
        m = prediction.heads["absolute"]
        factor = prediction.factor(prediction.units.get("absolute", "noise"))
        return Diagonal(math.pi / 2 * per_sample(factor, m) * m.square())

    @classmethod
    def regression(cls, example: Example, unit: str) -> Regression:
        return Regression.plain(example.residual(unit).abs())


def main() -> None:
    """Fit it beside NPR on a few images, and score both on others."""
    images = test_images("fashion")
    half = len(images) // 2
    model = optcov.load("fashion", schedule="linear")
    quick = {"images": 64, "measure_images": 0, "calibration_samples": 0, "flip": False}
    bundle = optcov.fit(model, images[:half], heads=["npr", "absolute"], **quick)
    print(bundle.bits_per_dim(images[half : half + 8], steps=10, methods=["NPR-DDPM", "Abs-DDPM"]))
    drawn = bundle.sample(4, method="Abs-DDIM", steps=10)
    print(f"drew {tuple(drawn.shape)} by Abs-DDIM")


if __name__ == "__main__":
    main()
