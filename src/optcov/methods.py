"""All methods by name: the rows of the paper's tables, and others.

A name fixes the forward process, the covariance and the settings. `draw` runs any method on the same network from the
same noise: a reverse process, a solver, or a diffusers scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from optcov.covariances import Covariance
from optcov.forward import ForwardProcess
from optcov.noise import batch_noise
from optcov.prediction import Network
from optcov.reverse import ReverseProcess
from optcov.sampling import sample
from optcov.schedule import Schedule
from optcov.solvers import (
    PEERS,
    BridgeNoise,
    MultistepNoise,
    SolverResult,
    euler_maruyama,
    few_step_times,
    gotta_go_fast,
    multistep_sample,
    peer,
    probability_flow,
)
from optcov.trajectory import Trajectory


@final
@dataclass(frozen=True)
class Method:
    """A method by its name, such as a row of the paper's tables.

    There are two kinds. The first kind steps by a ReverseProcess: eta and covariance are set. The second kind has its
    own solver: solver is set, to a name in optcov.solvers or to "peer" for a diffusers scheduler.
    noise_cap: the paper's y. A bundle may replace it by the value for its data set. Hand-crafted covariances have none,
    like the paper's baselines.
    convention: how a solver places its steps (optcov.solvers). The paper ran score_sde's own code for its solver rows,
    so "score_sde" steps like that code. dataclasses.replace(method, convention="exact") ends at the right time instead.
    """

    name: str
    continuous: bool
    eta: float | None = None
    covariance: str | None = None
    solver: str | None = None
    noise_cap: float | None = None
    convention: str = "exact"

    @property
    def adaptive(self) -> bool:
        """Whether the method chooses its own steps, by a tolerance."""
        return self.solver == "gotta_go_fast"

    def forward(self, schedule: Schedule) -> ForwardProcess:
        """Return the forward process that the method reverses."""
        if self.eta is None:
            raise ValueError(
                f"{self.name!r} is a solver, not a reverse process; sample by bundle.sample(n, method={self.name!r})"
            )
        if self.continuous and schedule.discrete:
            raise ValueError(
                f"{self.name!r} runs in continuous time, but the schedule has {schedule.grid_size} steps; "
                f"use Schedule.vp_sde(), or {self.discrete_name!r}"
            )
        return ForwardProcess(schedule, self.eta)

    def reverse_process(
        self, network: Network, schedule: Schedule, data_range: tuple[float, float] | None = (-1, 1), **options: Any
    ) -> ReverseProcess:
        """Compose the method's reverse process; options are those of ReverseProcess."""
        forward = self.forward(schedule)
        assert self.covariance is not None
        return ReverseProcess(network, forward, self.covariance, data_range, **options)

    @property
    def discrete_name(self) -> str:
        """The name of the same method in discrete time."""
        same = (
            m.name
            for m in METHODS.values()
            if not m.continuous and (m.eta, m.covariance) == (self.eta, self.covariance)
        )
        return next(same, self.name)


_SOLVERS = (
    Method("Euler-Maruyama", continuous=True, solver="euler_maruyama", convention="score_sde"),
    Method("Probability flow", continuous=True, solver="probability_flow", convention="score_sde"),
    Method("Gotta Go Fast", continuous=True, solver="gotta_go_fast"),
)
_PAPER_ORDER = (
    *("DDPM, beta-tilde", "DDPM, beta", "A-DDPM", "NPR-DDPM", "SN-DDPM"),
    *("DDIM", "A-DDIM", "NPR-DDIM", "SN-DDIM", "Improved DDPM"),
    *("Euler-Maruyama", "Ancestral sampling", "Probability flow", "A-DPM", "NPR-DPM", "SN-DPM", "Gotta Go Fast"),
)


@lru_cache(maxsize=1)  # whoever walks METHODS asks once for each name
def _methods_of(covariances: tuple[type[Covariance], ...]) -> dict[str, Method]:
    found = [
        Method(row.name, row.continuous, row.eta, kind.name, noise_cap=row.noise_cap)
        for kind in covariances
        for row in kind.rows
    ]
    by_name = {method.name: method for method in (*found, *_SOLVERS)}
    return {name: by_name[name] for name in dict.fromkeys((*_PAPER_ORDER, *by_name))}


@final
class _Methods(Mapping[str, Method]):
    """All methods by name: the rows that the covariances have, and the solvers; those of the paper in its order.

    It looks when asked, so that a covariance that somebody adds brings its rows along.
    """

    def _all(self) -> dict[str, Method]:
        return _methods_of(tuple(Covariance.registry.values()))

    def __getitem__(self, name: str) -> Method:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return f"METHODS({'; '.join(self)})"


METHODS: Mapping[str, Method] = _Methods()

PEER_METHODS: Mapping[str, Method] = MappingProxyType(
    {name: Method(name, continuous=False, solver="peer") for name in PEERS}  # diffusers' own schedulers
)

FEW_STEP_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "Bridge 2M": Method("Bridge 2M", continuous=False, solver="bridge"),
        "Matched 2M": Method("Matched 2M", continuous=False, solver="matched"),
    }  # optcov.solvers.multistep; not the paper's
)


DEFAULT_METHOD = "Bridge 2M"  # for images, of bundle.sample and the commands: the best that was measured in few steps
HEAD_METHOD = "NPR-DDIM"  # where a head is to be used: of attach, and of what needs a covariance
NEAREST = 3  # how many names answer one that is unknown


def find_method(name: str) -> Method:
    """Look a method up by its name; upper and lower case are the same."""
    if not isinstance(name, str):
        raise ValueError(f"method = {name!r:.80} is not a name of METHODS; pass one such as {DEFAULT_METHOD!r}")
    for known, method in {**METHODS, **FEW_STEP_METHODS, **PEER_METHODS}.items():
        if known.lower() == name.strip().lower():
            return method
    raise unknown_method(name, [*METHODS, *FEW_STEP_METHODS, *PEER_METHODS])


def unknown_method(name: str, known: Sequence[str]) -> ValueError:
    """The error for an unknown name. It lists the methods of that covariance, or the nearest names."""
    rows = [row for row, method in METHODS.items() if row in known and method.covariance == name.strip().lower()]
    near = rows[:NEAREST] or _nearest(name, known)
    if not near:
        return ValueError(f"unknown method {name[:80]!r}; take {DEFAULT_METHOD}; optcov sample --help lists them all")
    *first, last = near
    meant = f"{', '.join(first)} or {last}" if first else last
    return ValueError(f"unknown method {name[:80]!r}; did you mean {meant}? optcov sample --help lists them all")


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The names that are spelt most like this one, those that begin with it or hold it first."""
    typed = _letters(name)[:80]
    spelt = {_letters(other): other for other in known}
    holding = sorted(
        (word for word in spelt if len(typed) > 1 and typed in word), key=lambda w: not w.startswith(typed)
    )
    close = get_close_matches(typed, list(spelt), NEAREST)
    return [spelt[word] for word in dict.fromkeys([*holding, *close])][:NEAREST]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def draw(
    method: Method,
    network: Network,
    schedule: Schedule,
    steps: int,
    image_shape: Sequence[int],
    indices: Sequence[int],
    seed: int = 0,
    *,
    process: ReverseProcess | None = None,
    step_noise: MultistepNoise | None = None,
    trajectory: Trajectory | None = None,
    data_range: tuple[float, float] | None = (-1, 1),
    condition: Mapping[str, Tensor] | None = None,
    noise_cap: float | None = None,
    last_step: str = "mean",
    relative_tolerance: float = 0.05,
    callback: Callable[[Any], None] | None = None,
    device: torch.device | str = "cpu",
) -> SolverResult:
    """Draw the images with the given indices by any method, in `steps` network evaluations each.

    process: the method's reverse process. Pass it if it needs numbers per time, or if you have built it already.
    step_noise: the noise of a multistep sampler. Matched 2M needs it (optcov.solvers.match_noise).
    trajectory: the times to visit. By default even times, or Karras times for Bridge 2M. Other solvers choose their
    own.
    condition: further inputs of the network by name, each a tensor with one entry per image.
    noise_cap: the paper's y; None for no cap. Method.noise_cap holds the paper's value.
    relative_tolerance: for Gotta Go Fast, which chooses its own steps and ignores `steps`.

    >>> from optcov import oracle
    >>> schedule, data = Schedule.linear(), oracle.GaussianMixture([1.0], [[0.0, 0.0]], [0.25])
    >>> draw(METHODS["SN-DDIM"], data.network(schedule), schedule, 10, (2,), range(4)).x_0.shape
    torch.Size([4, 2])
    """
    if method.solver is not None:
        takes_trajectory = method.solver in ("bridge", "matched")
        if trajectory is not None and not takes_trajectory:
            raise ValueError(f"{method.name} has times of its own; leave trajectory out")
        options: dict[str, Any] = {"data_range": data_range, "condition": condition}
        if takes_trajectory:
            if method.solver == "bridge" and step_noise is None:
                step_noise = BridgeNoise(schedule, trajectory or few_step_times(schedule, steps, image_shape))
            if step_noise is None:
                raise ValueError("Matched 2M needs its matched noise; measure it first (optcov.solvers.match_noise)")
            std = schedule.unit_data_std(step_noise.trajectory.times[-1])
            start = batch_noise(seed, indices, 0, image_shape).to(device) * std
            return multistep_sample(network, step_noise, start, seed, indices=indices, callback=callback, **options)
        start = batch_noise(seed, indices, 0, image_shape).to(device) * schedule.unit_data_std(schedule.final_time)
        if method.solver == "probability_flow":
            return probability_flow(network, schedule, start, steps, convention=method.convention, **options)
        options |= {"seed": seed, "indices": indices}
        if method.adaptive:
            return gotta_go_fast(network, schedule, start, relative_tolerance, **options)
        if method.solver == "euler_maruyama":
            return euler_maruyama(network, schedule, start, steps, convention=method.convention, **options)
        return peer(method.name, network, schedule, start, steps, **options)
    process = process or method.reverse_process(network, schedule, data_range)
    trajectory = trajectory or Trajectory.even(schedule, steps)
    shape = (len(indices), *image_shape)
    x_0 = sample(
        process,
        trajectory,
        shape,
        seed,
        noise_cap=noise_cap,
        last_step=last_step,
        condition=condition,
        indices=indices,
        callback=callback,
        device=device,
    )
    return SolverResult(x_0, torch.full((len(indices),), len(trajectory)))
