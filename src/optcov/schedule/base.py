"""The interface of every schedule; see optcov.schedule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from optcov.identity import digest, digest_numbers, known_by

if TYPE_CHECKING:
    from optcov.schedule.discrete import DiscreteSchedule
    from optcov.schedule.real_times import EDMSchedule, FlowSchedule, VESchedule, VPSchedule

Time = float | Tensor  # a number, or a (B,) tensor
_Self = TypeVar("_Self")


def remembered(method: Callable[[_Self, Time], Tensor]) -> Callable[[_Self, Time], Tensor]:
    """Cache the result, (), for times that are numbers: a loop asks for the same times again and again."""

    @lru_cache(maxsize=4096)
    def known(owner: _Self, t: float) -> tuple[float, torch.dtype]:
        found = method(owner, t)
        return found.item(), found.dtype

    @wraps(method)
    def at(self: _Self, t: Time) -> Tensor:
        if not isinstance(t, Real):
            return method(self, t)
        value, dtype = known(self, t)
        # a new tensor each time: callers may change it in place, or ask in inference mode
        return torch.tensor(value, dtype=dtype)

    return at


class Schedule(ABC):
    """Noise levels by time.

    Build one by `linear`, `cosine`, `vp_sde`, `ve_sde`, `edm`, `flow`, `from_betas` or `from_diffusers`. A new schedule
    is a subclass with the four abstract methods. Bundles can store it if it has a name and its arguments are numbers.

    >>> schedule = Schedule.linear()
    >>> round(float(schedule.alpha_bar(500)), 6)
    0.078587
    """

    discrete: bool = False  # whether times are whole numbers
    final_time: float = 1.0  # N, 1, or the largest sigma
    first_time: float = 1e-5  # the smallest time that networks are trained at
    small_step: float = 1e-3  # one step of the full process: 1, or a thousandth of real times
    grid_size: int = 1000  # how many times the full process visits: N, or 1000 of real times
    argument_scale: float = 999.0  # a network trained on it is told its time times this
    preserves_variance: bool = True  # whether alpha_bar + beta_bar = 1 at every time
    name: str = ""  # as `spec` calls it
    registry: ClassVar[dict[str, type[Schedule]]] = {}

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            cls.registry[cls.name] = cls

    @property
    def betas(self) -> Tensor:
        """The betas; only a discrete schedule has them."""
        raise AttributeError(f"{type(self).__name__} has no betas; a discrete schedule has")

    @abstractmethod
    def log_alpha_bar(self, t: Time) -> Tensor:
        """Logarithm of the signal power, () or (B,)."""

    @abstractmethod
    def log_beta_bar(self, t: Time) -> Tensor:
        """Logarithm of the noise power, () or (B,); minus infinity at time 0."""

    @abstractmethod
    def time_at(self, log_snr: Tensor) -> Tensor:
        """The time with this log-SNR, float64; between discrete times it is interpolated."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The arguments that rebuild the schedule, as plain JSON values."""

    @property
    def steps(self) -> int | None:
        """N of a discrete schedule, None for real times. For display; code uses `discrete` and `grid_size`."""
        return self.grid_size if self.discrete else None

    @remembered
    def check_times(self, t: Time) -> Tensor:
        """Return times as a CPU tensor, or raise a ValueError that names a wrong one."""
        times = as_times(t, torch.float64)
        if times.ndim > 1:
            raise ValueError(f"times must be a number or a (B,) tensor, got shape {tuple(times.shape)}")
        outside = ~((times >= 0) & (times <= self.final_time))
        if bool(outside.any()):
            raise ValueError(
                f"time {first_of(times, outside)} is outside this schedule; use real times from 0 to "
                f"{self.final_time:g}"
                f"{' (divide a step number by the number of steps)' if self.final_time == 1 else ''}"
            )
        return times

    def grid(self, numbers: Iterable[int]) -> list[float]:
        """Times of the full process by their numbers 0..grid_size."""
        return [n * self.final_time / self.grid_size for n in numbers]

    def full_grid(self) -> Tensor:
        """All times of the full process except 0, ascending, (grid_size,), in the dtype of `check_times`."""
        return self.check_times(torch.tensor(self.grid(range(1, self.grid_size + 1)), dtype=torch.float64))

    @property
    def last_time_with_signal(self) -> float:
        """The final time. If no signal is left there, the time before it on the full grid."""
        return self.grid([self.grid_size - (float(self.alpha_bar(self.final_time)) == 0)])[0]

    def number(self, t: float) -> float:
        """The number of a time in the full process, 0..grid_size; a fraction between two times."""
        return t * self.grid_size / self.final_time

    def nearest(self, t: Tensor) -> Tensor:
        """The nearest times at which a network can be called, (B,), in the dtype of `check_times`."""
        return t.double().clamp(self.first_time, self.final_time)

    def quantile(self, share: Tensor) -> Tensor:
        """Training times by their quantiles in [0, 1), (B,); they are uniform."""
        return self.first_time + (self.final_time - self.first_time) * share

    def stream(self, t: float) -> int:
        """The number of the noise stream of a time. Real times that differ by 1e-9 have different numbers."""
        return round(t * 10**9)

    def spec(self) -> dict[str, Any]:
        """Name and settings as plain JSON values, for files and for telling schedules apart."""
        return {"kind": self.name, **self.settings()}

    def levels(self, t: Time) -> tuple[Tensor, Tensor]:
        """sqrt(alpha_bar) and sqrt(beta_bar), () or (B,): the weights of x_0 and noise in x_t."""
        return self.alpha_bar(t).sqrt(), self.beta_bar(t).sqrt()

    def level_rates(self, t: Time) -> tuple[Tensor, Tensor]:
        """Derivatives of `levels` by t, () or (B,), for t above 0. The probability flow uses them."""
        self.require_real_times("the probability flow")
        with torch.inference_mode(False), torch.enable_grad():
            times = torch.as_tensor(t, dtype=torch.float64).detach().cpu().clone().requires_grad_()
            rates = [_slope(level, times) for level in self.levels(times)]
        return rates[0], rates[1]

    def beta(self, t: Time) -> Tensor:
        """Rate of noise of the VP SDE dx = -beta(t)/2 x dt + sqrt(beta(t)) dw, () or (B,).

        Other schedules have none.
        """
        raise ValueError(f"this solver reverses the VP SDE and needs Schedule.vp_sde(), got {self!r}")

    def unit_data_std(self, t: Time) -> Tensor:
        """Standard deviation of x_t for data of mean 0 and variance 1, () or (B,). At the end it is the prior's."""
        return (self.alpha_bar(t) + self.beta_bar(t)).sqrt()

    @remembered
    def alpha_bar(self, t: Time) -> Tensor:
        """Signal power, () or (B,)."""
        return self.log_alpha_bar(t).exp()

    @remembered
    def beta_bar(self, t: Time) -> Tensor:
        """Noise power, () or (B,)."""
        return self.log_beta_bar(t).exp()

    @remembered
    def log_snr(self, t: Time) -> Tensor:
        """log(alpha_bar / beta_bar), () or (B,); infinite at time 0."""
        return self.log_alpha_bar(t) - self.log_beta_bar(t)

    def require_real_times(self, what: str) -> None:
        """Raise a ValueError for a schedule of discrete times."""
        if self.discrete:
            raise ValueError(
                f"{self!r} has no real times, so there is no way to follow {what}; use Schedule.vp_sde() or another "
                f"schedule with real times"
            )

    def on_grid(self, steps: int | None = None) -> DiscreteSchedule:
        """The same process as a discrete schedule of `steps` even times, by default of grid_size."""
        from optcov.schedule.discrete import DiscreteSchedule

        self.require_real_times("it on another grid")
        if not self.preserves_variance:
            raise ValueError(
                f"{self!r} does not preserve variance, so that betas cannot describe it; put the network on a discrete "
                f"schedule such as Schedule.linear(), by its noise levels"
            )
        count = self.grid_size if steps is None else check_whole("steps", steps, 1)
        times = torch.arange(count + 1, dtype=torch.float64) * self.final_time / count
        return DiscreteSchedule(-torch.expm1(self.log_alpha_bar(times).diff()))

    def digest(self) -> str:
        """SHA-256 of the noise levels, in hexadecimal. Schedules with the same numbers have the same digest."""
        at = self.full_grid()
        return digest([self.steps, digest_numbers(self.log_alpha_bar(at)), digest_numbers(self.log_snr(at))])

    def identity(self) -> dict[str, str]:
        """The schedule's entry of an identity: compared by the levels, shown by the name."""
        return known_by(self.digest(), repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.settings().items())})"

    @staticmethod
    def linear(steps: int = 1000, scale: bool = True) -> DiscreteSchedule:
        """Betas evenly spaced from 1e-4 to 0.02, multiplied by 1000 / steps unless scale is False."""
        steps = check_whole("steps", steps, 1)
        factor = 1000 / steps if scale else 1.0
        return Schedule.from_betas(np.linspace(factor * 1e-4, factor * 0.02, steps))

    @staticmethod
    def cosine(steps: int = 1000, max_beta: float = 0.999) -> DiscreteSchedule:
        """The squared-cosine schedule of Improved DDPM."""
        steps, max_beta = check_whole("steps", steps, 1), check_number("max_beta", max_beta)
        grid = np.arange(steps + 1) / steps
        signal = np.cos((grid + 0.008) / 1.008 * math.pi / 2) ** 2
        return Schedule.from_betas(np.minimum(1 - signal[1:] / signal[:-1], max_beta))

    @staticmethod
    def vp_sde(beta_min: float = 0.1, beta_max: float = 20.0) -> VPSchedule:
        """The variance-preserving SDE with beta(t) = beta_min + t (beta_max - beta_min), t in [0, 1]."""
        from optcov.schedule.real_times import VPSchedule

        return VPSchedule(beta_min, beta_max)

    @staticmethod
    def ve_sde(sigma_min: float = 0.01, sigma_max: float = 50.0) -> VESchedule:
        """The variance-exploding SDE: alpha_bar = 1, beta_bar = sigma(t)^2 - sigma_min^2, with sigma geometric in t."""
        from optcov.schedule.real_times import VESchedule

        return VESchedule(sigma_min, sigma_max)

    @staticmethod
    def edm(sigma_min: float = 0.002, sigma_max: float = 80.0) -> EDMSchedule:
        """The schedule of EDM (Karras et al. 2022): x_t = x_0 + t eps.

        A time is its sigma, a real number in (0, sigma_max].
        """
        from optcov.schedule.real_times import EDMSchedule

        return EDMSchedule(sigma_min, sigma_max)

    @staticmethod
    def flow() -> FlowSchedule:
        """Flow matching (rectified flow): x_t = (1 - t) x_0 + t eps, real times in (0, 1]."""
        from optcov.schedule.real_times import FlowSchedule

        return FlowSchedule()

    @staticmethod
    def from_betas(betas: Sequence[float] | np.ndarray[Any, Any] | Tensor) -> DiscreteSchedule:
        """Any variance-preserving schedule, from its betas at times 1..N. Each is in (0, 1); the last may be 1."""
        from optcov.schedule.discrete import DiscreteSchedule

        try:
            values = torch.as_tensor(betas, dtype=torch.float64).detach().cpu().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"betas = {betas!r:.80} is not a sequence of numbers, each in (0, 1)") from error
        return DiscreteSchedule(values)

    @staticmethod
    def from_diffusers(scheduler: Any) -> Schedule:
        """The schedule of a diffusers scheduler, recomputed in float64 from its config.

        diffusers counts times 0..N-1, so its t is our t - 1. For beta schedules other than linear, scaled_linear and
        squaredcos_cap_v2, the scheduler's own float32 betas are used. A flow-matching scheduler gives Schedule.flow();
        an EDM scheduler gives Schedule.edm().
        """
        from optcov.schedule.from_diffusers import from_diffusers

        return from_diffusers(scheduler)


def check_number(name: str, value: Any) -> float:
    """Return a number as a float, or raise a ValueError that names the argument."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
        with suppress(OverflowError, RuntimeError):  # of an int beyond all floats, of a tensor without values
            return float(value)
    raise ValueError(f"{name} = {value!r:.80} is not a number; pass one")


def check_schedule(schedule: Any) -> Schedule:
    """Return a schedule, or raise a ValueError that says what to pass."""
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule = {schedule!r:.80} is not a Schedule; build one, such as Schedule.linear()")
    return schedule


def as_times(t: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return times as a CPU tensor of any shape, or raise a ValueError that names a wrong value."""
    try:
        if isinstance(t, complex) or (isinstance(t, Tensor) and t.is_complex()):
            raise TypeError("complex")
        return torch.as_tensor(t, dtype=dtype).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"time {t!r:.80} is not a number or a (B,) tensor of numbers; pass one") from error


def is_whole(value: Any) -> bool:
    """Whether a number is an integer, such as 3, 3.0 or numpy's 3. True and False do not count as numbers."""
    return (
        isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and float(value).is_integer()
    )


def check_whole(name: str, value: Any, least: int | None = None, error: type[ValueError] = ValueError) -> int:
    """Return a whole number as an int, or raise an error that names the argument."""
    if is_whole(value) and (least is None or value >= least):
        return int(value)
    kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
    remedy = f"{kind}; pass one such as {least}"
    raise error(f"{name} = {value!r} is not a {'whole number; pass one such as 0' if least is None else remedy}")


def check_signal_left(log_alpha_bar: float, what: str) -> None:
    """Refuse a schedule with too little signal at its end.

    x_0 is recovered by dividing by sqrt(alpha_bar), which would fail in float32.
    """
    if log_alpha_bar < math.log(1e-36):
        raise ValueError(
            f"the signal vanishes: the logarithm of the last alpha_bar is {log_alpha_bar:.1f}, below that of 1e-36; "
            f"use smaller {what} or fewer steps"
        )


def first_of(times: Tensor, where: Tensor) -> float:
    """The first of the marked times, formatted for a message."""
    value = float(times[where].flatten()[0])
    return int(value) if value.is_integer() else value


def _slope(level: Tensor, times: Tensor) -> Tensor:
    """d level / d times, entry by entry; 0 for a level that does not depend on time."""
    if not level.requires_grad:
        return torch.zeros_like(times).detach()
    (slope,) = torch.autograd.grad(level.sum(), times)
    return slope
