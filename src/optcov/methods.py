"""The paper's methods by the names of its rows: which forward process, which covariance, which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from optcov.estimators import PerTime
from optcov.forward import ForwardProcess
from optcov.prediction import Network
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule


@final
@dataclass(frozen=True)
class Method:
    """One row of the paper's tables.

    A method either steps by a ReverseProcess (eta and covariance are set) or integrates the reverse SDE or ODE
    (solver is set: a name in optcov.solvers). noise_cap is the paper's y, which a bundle may replace by that of its
    data set; hand-crafted covariances are sampled without it, as the paper's baselines are.
    """

    name: str
    continuous: bool
    eta: float | None = None
    covariance: str | None = None
    solver: str | None = None
    noise_cap: float | None = None

    def forward(self, schedule: Schedule) -> ForwardProcess:
        """Return the forward process that the method reverses."""
        if self.eta is None:
            raise ValueError(f"{self.name!r} is a solver, not a reverse process; run it by optcov.solvers")
        if self.continuous and schedule.steps is not None:
            raise ValueError(
                f"{self.name!r} runs in continuous time, but the schedule has {schedule.steps} steps; "
                f"use Schedule.vp_sde(), or {self.discrete_name!r}"
            )
        return ForwardProcess(schedule, self.eta)

    def reverse_process(
        self,
        network: Network,
        schedule: Schedule,
        data_range: tuple[float, float] | None = (-1, 1),
        *,
        mean_square_noise: PerTime | None = None,
        mean_square_residual: PerTime | None = None,
    ) -> ReverseProcess:
        """Compose the method's reverse process."""
        forward = self.forward(schedule)
        assert self.covariance is not None
        return ReverseProcess(
            network,
            forward,
            self.covariance,
            data_range,
            mean_square_noise=mean_square_noise,
            mean_square_residual=mean_square_residual,
        )

    @property
    def discrete_name(self) -> str:
        """The row of the same composition in discrete time."""
        same = (
            m.name
            for m in METHODS.values()
            if not m.continuous and (m.eta, m.covariance) == (self.eta, self.covariance)
        )
        return next(same, self.name)


_ROWS = (
    Method("DDPM, beta-tilde", continuous=False, eta=1.0, covariance="beta_tilde"),
    Method("DDPM, beta", continuous=False, eta=1.0, covariance="beta"),
    Method("A-DDPM", continuous=False, eta=1.0, covariance="analytic", noise_cap=1.0),
    Method("NPR-DDPM", continuous=False, eta=1.0, covariance="npr", noise_cap=1.0),
    Method("SN-DDPM", continuous=False, eta=1.0, covariance="sn", noise_cap=1.0),
    Method("DDIM", continuous=False, eta=0.0, covariance="beta_tilde"),
    Method("A-DDIM", continuous=False, eta=0.0, covariance="analytic", noise_cap=1.0),
    Method("NPR-DDIM", continuous=False, eta=0.0, covariance="npr", noise_cap=1.0),
    Method("SN-DDIM", continuous=False, eta=0.0, covariance="sn", noise_cap=1.0),
    Method("Improved DDPM", continuous=False, eta=1.0, covariance="range"),
    Method("Euler-Maruyama", continuous=True, solver="euler_maruyama"),
    Method("Ancestral sampling", continuous=True, eta=1.0, covariance="beta"),
    Method("Probability flow", continuous=True, solver="probability_flow"),
    Method("A-DPM", continuous=True, eta=1.0, covariance="analytic", noise_cap=2.0),
    Method("NPR-DPM", continuous=True, eta=1.0, covariance="npr", noise_cap=2.0),
    Method("SN-DPM", continuous=True, eta=1.0, covariance="sn", noise_cap=2.0),
    Method("Gotta Go Fast", continuous=True, solver="gotta_go_fast"),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ROWS})


def find_method(name: str) -> Method:
    """Look a method up by the name of its row; upper and lower case are the same."""
    for known, method in METHODS.items():
        if known.lower() == name.lower():
            return method
    raise ValueError(f"unknown method {name!r}; choose one of: {'; '.join(METHODS)}")
