"""How noisy each time is: signal power alpha_bar, noise power beta_bar, and the logarithm of their ratio.

q(x_t | x_0) = N(sqrt(alpha_bar_t) x_0, beta_bar_t I)  (Eq. 2). Time 0 is data. A discrete schedule counts its times
0..N; real times run over [0, 1], and those of EDM are its sigma. Everything is float64, and beta_bar is computed from
log alpha_bar, never as 1 - alpha_bar, so that nothing cancels at either end.

A schedule answers what depends on its kind, so that nobody asks of what kind it is (see `Schedule`). A new one is a
subclass with four methods.
"""

from optcov.schedule.base import Schedule, Time, check_number, check_schedule, check_whole, is_whole, remembered
from optcov.schedule.discrete import DiscreteSchedule
from optcov.schedule.real_times import EDMSchedule, FlowSchedule, VESchedule, VPSchedule

__all__ = [
    "DiscreteSchedule",
    "EDMSchedule",
    "FlowSchedule",
    "Schedule",
    "Time",
    "VESchedule",
    "VPSchedule",
    "check_number",
    "check_schedule",
    "check_whole",
    "is_whole",
    "remembered",
]
