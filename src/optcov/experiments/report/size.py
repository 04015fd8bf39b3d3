"""How much a report draws of a bundle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from optcov.schedule import Schedule


@final
@dataclass(frozen=True)
class ReportSize:
    """How much a report draws of its own."""

    grid_steps: tuple[int, ...] = (5, 10, 25)
    grid_images: int = 9
    map_images: int = 8
    map_times: int = 3
    curve_steps: int = 25
    curve_images: int = 16
    error_images: int = 48
    error_times: int = 10

    def within(self, schedule: Schedule) -> ReportSize:
        """The same, with no more times than a schedule has."""
        N = schedule.grid_size
        return replace(
            self,
            grid_steps=tuple(dict.fromkeys(min(K, N) for K in self.grid_steps)),
            map_times=max(1, min(self.map_times, N - 2)),
            curve_steps=min(self.curve_steps, N),
            error_times=min(self.error_times, N),
        )


QUICK = ReportSize((5, 10), 4, 4, 1, 10, 8, 24)
