"""How noisy each time is: signal power alpha_bar, noise power beta_bar, and the logarithm of their ratio.

q(x_t | x_0) = N(sqrt(alpha_bar_t) x_0, beta_bar_t I)  (Eq. 2). Time 0 is data. A discrete schedule counts its times
0..N. Real times are in [0, 1]; EDM's times are its sigma. Everything is float64. beta_bar is computed from log
alpha_bar, never as 1 - alpha_bar, so that no digits cancel at either end.

A new schedule is a subclass of `Schedule` with four methods. Other code asks a schedule for its properties, and never
for its class.
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
