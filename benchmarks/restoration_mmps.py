"""MMPS (Rozet et al. 2024) by azula's own code, on a bundle: a row of benchmarks/restoration.py.

The guidance and the step of DDPM are azula's. The network, the operator, the times and the noise are those of
`restore`: samples start from the same noise as in the other rows, and depend on (seed, image, sample) alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from azula.denoise import Denoiser
from azula.guidance import MMPSDenoiser
from azula.linalg.covariance import IsotropicCovariance
from azula.sample import DDPMSampler
from torch import Tensor
from torch.overrides import TorchFunctionMode

from optcov import Trajectory
from optcov.bundle import Bundle
from optcov.integrations.azula import BundleDenoiser
from optcov.inverse import Operator, Restoration
from optcov.inverse.arguments import MOST
from optcov.inverse.restoring import residual_of
from optcov.noise import NoiseSource


class Counted(Denoiser):
    """A denoiser that counts its evaluations, and the passes back to its input."""

    def __init__(self, inner: Denoiser):
        super().__init__()
        self.inner, self.schedule = inner, inner.schedule
        self.evaluations = self.gradients = 0

    def forward(self, x_t: Tensor, t: Tensor) -> Any:
        self.evaluations += 1
        x_t = x_t.view_as(x_t)  # a node of its own: every product with the Jacobian ends here
        if x_t.requires_grad:
            x_t.register_hook(self._pass_back)
        return self.inner(x_t, t)

    def _pass_back(self, gradient: Tensor) -> None:
        self.gradients += 1


class GivenNoise(TorchFunctionMode):
    """Inside, torch.randn_like returns this noise: azula's step draws there, from torch's one generator for all."""

    def __init__(self, noise: Tensor):
        super().__init__()
        self.noise = noise

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        return self.noise if function is torch.randn_like else function(*args, **(options or {}))


def restore_by_mmps(
    bundle: Bundle,
    measurement: Tensor,
    operator: Operator,
    noise_std: float,
    *,
    steps: int,
    samples: int,
    seed: int,
    batch_size: int,
    strength: float,
) -> Restoration:
    """Draw samples given each measurement (B, *M); strength: the iterations of azula's solver, GMRES.

    Each iteration is one product with the network's Jacobian, and the guidance takes one more.
    """
    denoiser = Counted(BundleDenoiser(bundle))
    times = Trajectory.even(bundle.schedule, steps)
    pairs = [(b, j) for b in range(len(measurement)) for j in range(samples)]
    chunks = [pairs[first : first + batch_size] for first in range(0, len(pairs), batch_size)]
    drawn = []
    for chunk in chunks:
        y = measurement[[b for b, _ in chunk]].flatten(1)  # azula's solvers take the last axis as the whole system
        guided = MMPSDenoiser(
            denoiser,
            y,
            lambda x: operator.apply(x).flatten(1),
            IsotropicCovariance(noise_std**2),
            "gmres",
            int(strength),
        )
        sampler = DDPMSampler(guided)
        noise = NoiseSource((len(chunk), *operator.shape), seed, [b * MOST + j for b, j in chunk])
        x = noise.drawn(0) * bundle.schedule.unit_data_std(times.times[-1])
        for number, (t, s) in enumerate(times.descending(), start=1):
            shares = (torch.tensor(time / bundle.schedule.final_time) for time in (t, s))
            with torch.no_grad(), GivenNoise(noise.drawn(3 * number)):
                x = sampler.step(x, *shares)
        drawn.append(x if bundle.data_range is None else x.clamp(*bundle.data_range))
    found = torch.cat(drawn).unflatten(0, (len(measurement), samples))
    return Restoration(
        samples=found,
        measurement=measurement,
        residual=residual_of(operator, found, measurement),
        evaluations=denoiser.evaluations // len(chunks),
        gradients=denoiser.gradients // len(chunks),
        unsolved=math.nan,  # azula does not tell
        operator=operator,
        noise_std=noise_std,
        method="MMPS, azula",
        data_range=bundle.data_range,
    )
