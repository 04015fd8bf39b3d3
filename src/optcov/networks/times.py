"""Times as a network was trained on them: the time argument, and how to meet another schedule.

The time argument of a network is (t - shift) * scale: scale 1000 / N for a discrete schedule of N steps (shift 0 or
1), and 999 for the VP SDE. A network knows noise by its level alone, so that it serves every schedule: a time t of
another one becomes the time with the same log-SNR on the network's own, and x_t is scaled to the noise that the network
knows there (which it has already, if both schedules are variance-preserving).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from optcov.schedule import Schedule, Time, remembered

TOLERANCE = 0.1  # of log-SNR: a network does not notice; the linear schedule ends 0.07 beyond the VP SDE


@final
@dataclass(frozen=True)
class TimeArgument:
    """The rule (t - shift) * scale.

    >>> TimeArgument(1000 / 4000, shift=1)(torch.tensor([1, 2, 500, 4000])).tolist()
    [0.0, 0.25, 124.75, 999.75]
    >>> TimeArgument(999.0)(0.5).item()
    499.5
    """

    scale: float
    shift: float = 0.0

    @staticmethod
    def default(schedule: Schedule) -> TimeArgument:
        """The rule of a network trained by this package on the schedule."""
        return TimeArgument(schedule.argument_scale)

    def __call__(self, t: Time) -> Tensor:
        """Argument as float32, () or (B,); never less, since half precision merges neighbouring times."""
        return ((torch.as_tensor(t, dtype=torch.float64) - self.shift) * self.scale).float()


@final
class TimeMatch:
    """From times of one schedule to times of equal log-SNR on the schedule that a network was trained on.

    Where the network has seen no such noise level, its nearest time is taken, with one warning.
    """

    def __init__(self, schedule: Schedule, native: Schedule):
        self.schedule, self.native = schedule, native
        self._highest = float(native.log_snr(native.first_time))
        self._lowest = float(native.log_snr(native.final_time))
        self.same_scale = schedule.preserves_variance and native.preserves_variance  # x_t needs no scaling
        self._warned = False

    @remembered
    def __call__(self, t: Time) -> Tensor:
        """Native time, float64, () or (B,)."""
        log_snr = self.schedule.log_snr(t)
        inside = log_snr.clamp(self._lowest, self._highest)
        self._warn_once(log_snr, inside)
        return self.native.time_at(inside).clamp(self.native.first_time, self.native.final_time)  # but for rounding

    def scale(self, t: Time) -> Tensor:
        """The factor that scales x_t to the network's own process at this log-SNR, () or (B,)."""
        if self.native.preserves_variance:  # the level tells it, also between two times of a discrete schedule
            own = torch.sigmoid(-self.schedule.log_snr(t).clamp(self._lowest, self._highest))
        else:
            own = self.native.beta_bar(self(t))
        return (own / self.schedule.beta_bar(t)).sqrt()

    def _warn_once(self, log_snr: Tensor, inside: Tensor) -> None:
        if self._warned or not bool(((log_snr - inside).abs() > TOLERANCE).any()):
            return
        self._warned = True
        warnings.warn(
            f"{self.schedule!r} has noise levels outside those the network was trained on (log-SNR "
            f"{self._lowest:.2f} to {self._highest:.2f} of {self.native!r}); the nearest trained time is used there",
            stacklevel=6,
        )
