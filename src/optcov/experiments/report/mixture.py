"""Every method of the paper on a mixture of Gaussians in the plane, where the perfect network is known.

The network is exact, so that what differs between the panels is the sampler alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.canvas import colours_of, new_figure, save
from optcov.covariances import BySpectrum, Example, Spectrum, find_covariance
from optcov.forward import ForwardProcess
from optcov.gaussian import PLAIN
from optcov.methods import METHODS, draw
from optcov.oracle import GaussianMixture
from optcov.prediction import Prediction
from optcov.schedule import Schedule, Time

DATA = GaussianMixture(
    weights=[0.25, 0.2, 0.2, 0.15, 0.2],
    means=[[-0.9, 0.6], [0.8, 0.8], [0.9, -0.6], [-0.6, -0.9], [0.0, 0.0]],
    covariances=[
        [[0.02, 0.0], [0.0, 0.02]],
        [[0.004, 0.0], [0.0, 0.06]],
        [[0.06, 0.0], [0.0, 0.004]],
        [[0.01, 0.0], [0.0, 0.01]],
        [[0.06, 0.055], [0.055, 0.06]],
    ],
)

SHOWN = (  # others look like one of these: SN, OCM and CNPR like NPR, Spectral like A, -DPM like -DDPM
    *("data", "DDPM, beta-tilde", "DDPM, beta", "A-DDPM"),
    *("NPR-DDPM", "DDIM", "NPR-DDIM", "Probability flow"),
)


@final
@dataclass(frozen=True)
class MixtureResult:
    """What one method drew."""

    method: str
    points: Tensor  # (n, 2)
    evaluations: float  # mean number of network evaluations per point
    distance: float  # sliced Wasserstein distance to fresh data


def run_mixture(steps: int, count: int = 2000) -> Iterator[MixtureResult]:
    """Draw `count` points by every method in `steps` steps; first comes fresh data, the floor of the distance."""
    data = DATA.sample(count, seed=1)
    floor = DATA.sample(count, seed=2)
    yield MixtureResult("data", floor, 0.0, sliced_wasserstein(floor, data))
    for method in METHODS.values():
        schedule = Schedule.vp_sde() if method.continuous else Schedule.linear()
        network, process = DATA.network(schedule), None
        if method.covariance is not None:
            options: dict[str, Any] = {"mean_square_noise": partial(mean_square_noise, schedule)}
            if find_covariance(method.covariance).spectrum is not None:
                options["spectrum"] = Spectrum(partial(residual_powers, schedule, method.covariance))
            process = method.reverse_process(network, schedule, None, **options)
        drawn = draw(
            method,
            network,
            schedule,
            steps,
            (2,),
            range(count),
            process=process,
            data_range=None,
            last_step="draw",
        )
        points = drawn.x_0.double()
        yield MixtureResult(
            method.name, points, float(drawn.evaluations.double().mean()), sliced_wasserstein(points, data)
        )


def mean_square_noise(schedule: Schedule, t: Time) -> Tensor:
    """Gamma_t = E mean(E[eps | x_t]^2), by 4,000 draws of x_t."""
    _, _, x_t = _noisy(schedule, t)
    return DATA.noise_moments(x_t, schedule, t).mean.square().mean()


def residual_powers(schedule: Schedule, covariance: str, t: Time) -> Tensor:
    """The spectrum that a covariance needs, (2,), by the same draws."""
    kind = find_covariance(covariance)
    assert issubclass(kind, BySpectrum)
    x_0, noise, x_t = _noisy(schedule, t)
    prediction = Prediction.of(DATA.network(schedule)(x_t, t), x_t, t, *schedule.levels(t))
    times = torch.full((len(x_0),), float(t), dtype=torch.float64)
    residual = kind.normalised(Example(prediction, x_0, noise, times, ForwardProcess(schedule)))
    return PLAIN.transform(residual).square().mean(0)


def _noisy(schedule: Schedule, t: Time) -> tuple[Tensor, Tensor, Tensor]:
    """Data, noise and x_t, (4000, 2) each."""
    x_0 = DATA.sample(4000, seed=11)
    noise = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(12), dtype=x_0.dtype)
    return x_0, noise, schedule.alpha_bar(t).sqrt() * x_0 + schedule.beta_bar(t).sqrt() * noise


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = 64) -> float:
    """Root mean square over directions of the 2-Wasserstein distance between projections of (n, 2) and (n, 2)."""
    angles = torch.arange(directions, dtype=torch.float64) * torch.pi / directions
    basis = torch.stack([angles.cos(), angles.sin()])
    gaps = (a.double() @ basis).sort(0).values - (b.double() @ basis).sort(0).values
    return float(gaps.square().mean().sqrt())


def draw_mixture(results: list[MixtureResult], steps: int, path: Path) -> None:
    """Write a picture of the methods that look different, a panel each."""
    shown = [result for result in results if result.method in SHOWN]
    figure = new_figure(8.0, 4.8)
    heading = f"The same perfect network, {steps} steps. Numbers: distance to the data"
    figure.suptitle(f"{heading}\n ", fontsize=11, linespacing=0.6)  # the empty line is room above the titles
    colours = colours_of(result.method for result in shown)
    for axes, result in zip(figure.subplots(2, 4).flat, shown, strict=True):
        _panel(axes, result, colours[result.method])
    save(figure, path)


def _panel(axes: Any, result: MixtureResult, colour: str) -> None:
    axes.scatter(*result.points.T, s=2, c=colour, alpha=0.6, linewidths=0)
    axes.set(xlim=(-2, 2), ylim=(-2, 2), xticks=[], yticks=[], aspect="equal")
    axes.set_title(f"{result.method}: {result.distance:.3f}", fontsize=10)
