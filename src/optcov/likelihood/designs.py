"""Which covariance designs a sweep prices, and which statistic of each it collects.

hand-crafted and one-number designs   nothing per pixel: their costs follow from the sum of errors
estimators                            the second moment v of each pixel
learned range                         the share u of each pixel
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from optcov.estimators import (
    Analytic,
    Beta,
    BetaTilde,
    CovarianceDesign,
    Estimator,
    IsotropicResidual,
    LearnedRange,
    PerTime,
    make_estimator,
)
from optcov.forward import ForwardProcess

DESIGNS = ("beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr", "range")
MEASURED = ("analytic", "npr_isotropic")  # their numbers per time may come from the sweep itself
_HEADLESS = ("beta_tilde", "beta", "analytic", "npr_isotropic")
_ETA_ONE = ("beta", "range")


@final
class DesignSet:
    """The designs of a sweep by name; None stands for one whose numbers the sweep itself measures."""

    def __init__(
        self,
        names: Sequence[str],
        forward: ForwardProcess,
        mean_square_noise: PerTime | None = None,
        mean_square_residual: PerTime | None = None,
        custom: Mapping[str, CovarianceDesign] | None = None,
    ):
        given = {"analytic": mean_square_noise, "npr_isotropic": mean_square_residual}
        self.by_name: dict[str, CovarianceDesign | None] = {}
        for name in names:
            design: CovarianceDesign | None
            if custom and name in custom:
                design = custom[name]
            elif name in MEASURED and given[name] is None:
                design = None
            else:
                design = make_estimator(name, mean_square_noise, mean_square_residual)
            if design is not None:
                design.check(forward)
                if not isinstance(design, Estimator | LearnedRange):
                    raise ValueError(
                        f"design {name!r} is neither an Estimator nor the learned range, so its costs cannot be "
                        f"collected in one sweep; score it by elbo"
                    )
            self.by_name[name] = design
        if not self.by_name:
            raise ValueError(f"a sweep needs at least one design; choose from {', '.join(DESIGNS)}")

    @property
    def names(self) -> tuple[str, ...]:
        """All designs."""
        return tuple(self.by_name)

    @property
    def per_pixel(self) -> dict[str, CovarianceDesign]:
        """Designs that differ from pixel to pixel."""
        return {name: d for name, d in self.by_name.items() if d is not None and not _is_isotropic(d)}

    @property
    def given_isotropic(self) -> dict[str, Estimator]:
        """Designs with one variance per time that is known beforehand."""
        return {name: d for name, d in self.by_name.items() if isinstance(d, Estimator) and _is_isotropic(d)}


def default_designs(heads: Sequence[str], forward: ForwardProcess) -> list[str]:
    """All designs that need no head, and those whose head the network has."""
    names = [name for name in DESIGNS if name in _HEADLESS or name in heads]
    return [name for name in names if forward.eta == 1 or name not in _ETA_ONE]


def _is_isotropic(design: CovarianceDesign) -> bool:
    return isinstance(design, Analytic | IsotropicResidual | Beta | BetaTilde)
