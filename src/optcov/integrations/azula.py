"""A bundle as a denoiser of azula: its posterior carries our covariance, and azula's samplers and guidance run on it.

azula's times are real, from 0 (data) to 1 (noise); they are ours as a share of the last one. A discrete schedule
answers at its nearest time.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from optcov.bundle import Bundle
from optcov.methods import find_method
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule

try:
    from azula.denoise import Denoiser, GaussianPosterior
    from azula.noise import Schedule as AzulaScheduleBase
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"optcov.integrations.azula needs {error.name}; install it by: pip install 'optcov[azula]'", name=error.name
    ) from error


@final
class AzulaSchedule(AzulaScheduleBase):  # type: ignore[misc]  # azula has no types
    """A schedule of ours as azula asks for it: t in [0, 1] -> (sqrt(alpha_bar), sqrt(beta_bar))."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def times(self, t: Tensor) -> Tensor:
        """Our times for azula's, float64, on the CPU."""
        ours = t.detach().double().cpu() * self.schedule.final_time
        return ours.round() if self.schedule.discrete else ours

    def __call__(self, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, spread = self.schedule.levels(self.times(t).flatten())
        return signal.reshape(t.shape).to(t), spread.reshape(t.shape).to(t)


@final
class BundleDenoiser(Denoiser):  # type: ignore[misc]
    """E[x_0 | x_t] and the variance of every pixel, as azula's GaussianPosterior.

    method: a row of METHODS, whose covariance counts. clip: whether the mean is brought into the data range; not by
    default, since azula's guidance takes its gradient.
    """

    def __init__(self, bundle: Bundle, method: str = "NPR-DDPM", clip: bool = False):
        super().__init__()
        if not isinstance(bundle, Bundle):
            raise ValueError(f"bundle = {bundle!r:.80} is not a Bundle; pass what optcov.load or optcov.fit returns")
        row = find_method(method)
        self.backbone = bundle.network  # a submodule, so that .to(device) reaches it
        self.process: ReverseProcess = bundle.reverse_process(row, all_heads=False, clip_mean=clip)
        if not self.process.covariance.has_posterior:
            raise ValueError(f"{row.name} says nothing of x_0 given x_t; choose a method such as NPR-DDPM")
        if self.process.covariance.structure not in ("isotropic", "diagonal"):
            raise ValueError(f"{row.name} correlates pixels, which azula's posterior cannot hold; choose NPR-DDPM")
        self.schedule = AzulaSchedule(bundle.schedule)

    def forward(self, x_t: Tensor, t: Tensor, **condition: Any) -> Any:
        """The posterior of x_0 given x_t (B, *D) at azula's time t, () or (B,)."""
        times = self.schedule.times(torch.as_tensor(t))
        if bool((times <= 0).any()):
            raise ValueError("time 0 is data: there is no noise to remove; ask at a time above 0")
        posterior = self.process.posterior(x_t, float(times) if times.ndim == 0 else times, **condition)
        return GaussianPosterior(posterior.mean, posterior.variance.expand_as(posterior.mean))
