"""Which covariances a sweep prices, and which statistic of each it collects.

one number per time      nothing per pixel: their costs follow from the sum of errors
diagonal                 the second moment v of each pixel
learned range            the share u of each pixel
correlated               nothing per pixel: their costs are computed image by image, at some nodes (see `cells`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from optcov.covariances import Covariance, PerTime, Spectrum, find_covariance, make_covariance
from optcov.forward import ForwardProcess

MEASURED = {"mean_square_noise": "noise_square", "mean_square_residual": "residual_square"}  # numbers, by their sums
PRICED = ("isotropic", "diagonal", "range", "correlated")  # structures whose costs are known for all steps at once


@final
class PricedCovariances:
    """The covariances of a sweep by name; None stands for one whose numbers the sweep itself measures."""

    def __init__(
        self,
        names: Sequence[str],
        forward: ForwardProcess,
        numbers: Mapping[str, PerTime | None],
        custom: Mapping[str, Covariance] | None = None,
        spectra: Mapping[str, Spectrum] | None = None,
    ):
        self.by_name: dict[str, Covariance | None] = {}
        for name in names:
            kind = type(custom[name]) if custom and name in custom else find_covariance(name)
            if kind.structure not in PRICED:
                raise ValueError(
                    f"covariance {name!r} correlates pixels, so its costs cannot be collected in one sweep; "
                    f"score it by elbo"
                )
            measured = not custom and kind.number is not None and numbers.get(kind.number) is None
            if measured and kind.number not in MEASURED:
                raise ValueError(
                    f"covariance {name!r} needs {kind.number} per time, which a sweep does not measure; "
                    f"score it by elbo"
                )
            given = (custom or {}).get(name, name)
            spectrum = (spectra or {}).get(kind.spectrum or "") if isinstance(given, str) else None
            covariance = None if measured else make_covariance(given, dict(numbers), spectrum)
            self.by_name[name] = None if covariance is None else covariance.bound_to(forward)
        if not self.by_name:
            raise ValueError(f"a sweep needs at least one covariance; choose from {', '.join(priced_names())}")

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self.by_name)

    @property
    def per_pixel(self) -> dict[str, Covariance]:
        """Those that differ from pixel to pixel."""
        return {name: d for name, d in self.by_name.items() if d is not None and d.structure != "isotropic"}

    @property
    def correlated(self) -> set[str]:
        """Those that correlate pixels."""
        return {name for name, d in self.by_name.items() if d is not None and d.structure == "correlated"}

    @property
    def given_isotropic(self) -> dict[str, Covariance]:
        """Those with one variance per time that is known beforehand."""
        return {name: d for name, d in self.by_name.items() if d is not None and d.structure == "isotropic"}


def priced_names() -> list[str]:
    """Names of all covariances that a sweep can price."""
    return [name for name, kind in Covariance.registry.items() if kind.structure in PRICED]


def default_covariances(
    heads: Sequence[str], forward: ForwardProcess, spectra: Mapping[str, Spectrum] | None = None
) -> list[str]:
    """Those whose head the network has or that need none, whose spectrum is there, and whose number can be measured."""
    kinds = {name: Covariance.registry[name] for name in priced_names()}
    return [
        name
        for name, kind in kinds.items()
        if (kind.head is None or kind.head in heads)
        and kind.only_eta in (None, forward.eta)
        and (kind.spectrum is None or kind.spectrum in (spectra or {}))
        and (kind.number is None or kind.number in MEASURED)
    ]
