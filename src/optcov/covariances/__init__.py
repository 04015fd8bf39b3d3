"""The covariances: each turns a network's prediction into a second moment v of x_0 given x_t.

    name                v                                   paper
    beta_tilde          0                                   DDPM ("small"), and plain DDIM
    beta                beta_bar                            DDPM ("large"), eta = 1 only
    analytic            k (1 - Gamma_t)                     Eq. 8
    npr_isotropic       k E mean((eps - eps_hat)^2)         Eq. 16 averaged over pixels and images
    sn                  k (h - eps_hat^2)                   Eq. 10
    npr                 k g                                 Eq. 16
    ocm                 (beta_bar / a) diag(d x0_hat/d x_t) by a head or by probes (OCM, ICLR 2025)
    sn_full, npr_full   their matrix forms                  Appendix B
    spectral            k B^T diag(E (B r)^2) B             not in the paper: B a cosine basis, r = eps - eps_hat
    npr_correlated      D^1/2 C D^1/2, D = diag(k g)        not in the paper: C the correlation of r / sqrt(g)
    sn_correlated       the same of SN                      not in the paper
    range               not of this form                    Improved DDPM

with k = beta_bar_t / alpha_bar_t. For all but "range", the reverse step has the covariance lambda^2 I + gamma^2 v.
"""

from __future__ import annotations

from typing import Any

# in this order they are registered, and shown
# isort: off
from optcov.covariances.base import BothUnits, Bounds, Covariance, Example, PerTime, Regression, Row, number_at
from optcov.covariances.beta import Beta, BetaTilde
from optcov.covariances.analytic import Analytic, IsotropicResidual, OneNumber
from optcov.covariances.squared_noise import FullSquaredNoise, SquaredNoise, squared_noise
from optcov.covariances.residual import FullResidual, Residual
from optcov.covariances.ocm import Ocm
from optcov.covariances.learned_range import LearnedRange, range_ends
from optcov.covariances.correlated import BySpectrum, CorrelatedResidual, CorrelatedSquaredNoise
from optcov.covariances.correlated import SpectralResidual, Spectrum
from optcov.covariances.clamped import clamped_in_words
# isort: on

__all__ = [
    "Analytic",
    "Beta",
    "BetaTilde",
    "BothUnits",
    "Bounds",
    "BySpectrum",
    "CorrelatedResidual",
    "CorrelatedSquaredNoise",
    "Covariance",
    "Example",
    "FullResidual",
    "FullSquaredNoise",
    "IsotropicResidual",
    "LearnedRange",
    "Ocm",
    "OneNumber",
    "PerTime",
    "Regression",
    "Residual",
    "Row",
    "SpectralResidual",
    "Spectrum",
    "SquaredNoise",
    "clamped_in_words",
    "find_covariance",
    "make_covariance",
    "number_at",
    "of_head",
    "range_ends",
    "squared_noise",
]


def find_covariance(name: str) -> type[Covariance]:
    """Look up the class of a covariance by its name; the error lists the names."""
    if not isinstance(name, str) or name not in Covariance.registry:
        known = ", ".join(sorted(Covariance.registry))
        raise ValueError(f"unknown covariance {name!r:.80}; choose one of {known}, or pass a covariance object")
    return Covariance.registry[name]


def of_head(head: str) -> type[Covariance]:
    """The covariance that a head is fitted for; the error lists the heads."""
    for kind in Covariance.registry.values():
        if kind.head == head and kind.structure != "matrix":
            return kind
    kinds = (kind for kind in Covariance.registry.values() if kind.structure != "matrix")
    known = ", ".join(sorted({kind.head for kind in kinds if kind.head}))
    raise ValueError(f"unknown head {head!r}; choose among {known}")


def make_covariance(
    covariance: str | Covariance, numbers: dict[str, PerTime | None] | None = None, spectrum: Any = None
) -> Covariance:
    """Make a covariance from its name, with the number per time or the spectrum that it needs."""
    kind = type(covariance) if isinstance(covariance, Covariance) else find_covariance(covariance)
    if spectrum is not None and (isinstance(covariance, Covariance) or not issubclass(kind, BySpectrum)):
        raise _without_spectrum(kind)
    if isinstance(covariance, Covariance):
        if kind.number is not None and (numbers or {}).get(kind.number) is not None:
            raise ValueError(
                f"{kind.number} comes beside {kind.__name__}, an object that has its own; leave one of them out"
            )
        return covariance
    if issubclass(kind, BySpectrum):
        if spectrum is None:
            raise ValueError(
                f"covariance {covariance!r} needs powers per frequency: pass spectrum=, a callable of t or a Spectrum; "
                f"a bundle that was fitted by this version has them (optcov fit)"
            )
        return kind(spectrum)
    if kind.number is None:
        return kind()
    given = (numbers or {}).get(kind.number)
    if given is None:
        remedy = (
            f"{kind.number}=" if kind.number in (numbers or {}) else f"{kind.__name__}(numbers) instead of its name"
        )
        raise ValueError(
            f"covariance {covariance!r} needs one number per time: pass {remedy}, a tensor of length N + 1 "
            f"or a callable of t"
        )
    return kind(given)  # type: ignore[call-arg]  # every class with a number takes it


def _without_spectrum(kind: type[Covariance]) -> ValueError:
    """What to raise if a spectrum comes with a covariance that would not look at it."""
    if issubclass(kind, BySpectrum):
        return ValueError(f"spectrum comes beside {kind.__name__}, an object that has its own; leave one of them out")
    known = [name for name, other in Covariance.registry.items() if issubclass(other, BySpectrum)]
    meant = f"{kind.name}_correlated" if f"{kind.name}_correlated" in known else None
    remedy = f'take "{meant}"' if meant else "take one of them"
    return ValueError(f'spectrum belongs to {", ".join(known)}, not to "{kind.name}"; {remedy}, or leave it out')
