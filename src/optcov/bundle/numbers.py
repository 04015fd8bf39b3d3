"""Numbers per time: Gamma_t of Analytic-DPM (Eq. 8) and the mean square residual of its corrected form.

They are measured at some times of the network's own schedule. The network knows a time only by its noise level. So
between the measured times, and on other schedules, they are interpolated linearly in the log-SNR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from optcov.bundle.errors import BundleError
from optcov.covariances import BothUnits
from optcov.schedule import Schedule, Time

# what a number per time is in velocity units, which hold where no signal is left
IN_VELOCITY = {"mean_square_noise": "velocity_variance", "mean_square_residual": "velocity_residual"}


@final
@dataclass(frozen=True)
class NumbersPerTime:
    """Averages over images, noise and pixels at some times, with standard errors."""

    times: Tensor  # of the network's own schedule, ascending, without 0, float64 (T,)
    mean_square_noise: Tensor  # Gamma_t = E mean(eps_hat^2), float64 (T,)
    mean_square_residual: Tensor | None = None  # E mean((eps - eps_hat)^2), float64 (T,); foreign files lack it
    mean_square_noise_error: Tensor | None = None  # standard error, float64 (T,)
    mean_square_residual_error: Tensor | None = None
    velocity_variance: Tensor | None = None  # E mean(u^2) - E mean(u_hat^2), u the velocity, float64 (T,)
    velocity_residual: Tensor | None = None  # E mean((u - u_hat)^2), float64 (T,)

    def __post_init__(self) -> None:
        for name, values in self.tensors().items():
            if values.dtype != torch.float64 or values.shape != self.times.shape or values.ndim != 1:
                raise BundleError(
                    f"{name} must be a float64 tensor (T,), one number for each of {self.times.numel()} times, "
                    f"got {values.dtype} of shape {tuple(values.shape)}"
                )
            if not bool((values.isfinite() & (values >= 0)).all()):
                raise BundleError(f"{name} holds a negative number, NaN or infinity; measure it again")
        if len(self.times) == 0 or float(self.times[0]) <= 0 or bool((self.times.diff() <= 0).any()):
            raise BundleError("times of the numbers per time must ascend, and start above 0")

    def tensors(self) -> dict[str, Tensor]:
        """All fields that are not None, by name."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: values for name, values in named.items() if values is not None}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> NumbersPerTime:
        """Build from named tensors; unknown and missing names are refused."""
        missing = {"times", "mean_square_noise"} - set(tensors)
        unknown = set(tensors) - set(NumbersPerTime.__dataclass_fields__)
        if missing or unknown:
            raise BundleError(f"numbers per time lack {sorted(missing)} or have the unknown {sorted(unknown)}")
        return NumbersPerTime(**dict(tensors))

    def function(self, name: str, native: Schedule, schedule: Schedule) -> Callable[[Time], Tensor]:
        """The numbers of this name as a function of the schedule's times: () or (B,), float64.

        native: the schedule that `times` belong to. Outside the measured noise levels, the nearest measured number is
        used.
        """
        if name not in self.tensors():
            raise BundleError(f"there is no {name} per time; measure it (optcov fit does, on the way)")
        levels = -native.log_snr(self.times).numpy()  # ascending

        def function(values: np.ndarray) -> Callable[[Time], Tensor]:
            def at(t: Time) -> Tensor:
                wanted = np.asarray(-schedule.log_snr(t).numpy())
                return torch.as_tensor(np.interp(wanted, levels, values), dtype=torch.float64)

            return at

        twin = IN_VELOCITY.get(name)
        if twin not in self.tensors():
            return function(self.tensors()[name].numpy())
        return BothUnits(*(function(self.tensors()[known].numpy()) for known in (name, twin)))
