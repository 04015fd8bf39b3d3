"""Which covariances a bundle can do, and which of them to use, by what its own calibration measured.

A head counts as good if on held-out images it predicts 0.8 to 1.25 times what was measured, in every tenth of the
times. One that was not calibrated is taken at its word, and one that is not good gives way: to the next head, and at
last to one number per time, which is right on average by its definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from optcov.bundle.bundle import Bundle
from optcov.covariances import Covariance, find_covariance
from optcov.methods import DEFAULT_METHOD, METHODS

GOOD = (0.8, 1.25)  # predicted / measured
PURPOSES = ("images", "likelihood", "uncertainty")
HEADS = ("npr", "sn", "ocm")  # in the order in which they are tried; NPR is right for the mean that the network has


@final
@dataclass(frozen=True)
class Recommendation:
    """What to use for a purpose."""

    covariance: str
    why: str  # a phrase
    method: str | None = None  # the row of METHODS that draws images by it


def possible_covariances(bundle: Bundle) -> list[str]:
    """Names of those whose head, number per time and spectrum are there, or that need none."""
    heads = {*bundle.heads, *(["range"] if bundle.network.learned_range else [])}
    numbers = set() if bundle.numbers is None else set(bundle.numbers.tensors())
    spectra = set() if bundle.spectra is None else set(bundle.spectra.powers)
    return [
        name
        for name, kind in Covariance.registry.items()
        if (kind.head is None or kind.head in heads)
        and (kind.number is None or kind.number in numbers)
        and (kind.spectrum is None or kind.spectrum in spectra)
    ]


def recommendations(bundle: Bundle) -> dict[str, Recommendation]:
    """What to use for images, for likelihoods and for uncertainty."""
    possible, doubts = possible_covariances(bundle), []
    for name in HEADS:
        if name in possible:
            good, words = judged(bundle, name)
            if good:
                method = {"images": _image_method(name)}
                return {purpose: Recommendation(name, words, method.get(purpose)) for purpose in PURPOSES}
            doubts.append(f"the head {name} {words}")
    why = "; ".join(doubts) or "there is no head"
    return {purpose: _without_head(possible, purpose, why) for purpose in PURPOSES}


def judged(bundle: Bundle, head: str) -> tuple[bool, str]:
    """Whether a head is good as far as is known, and why."""
    if find_covariance(head).about == "prediction" and bundle.heads[head].about == "zero":
        return False, "is a small difference of large numbers, which no calibration of the large ones shows"
    ratios = ratios_of(bundle.provenance.get("calibration"), head)
    if ratios is None:
        return True, f"the head {head} is there; it was not calibrated"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    if GOOD[0] <= min(ratios) and max(ratios) <= GOOD[1]:
        ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return True, f"on held-out images the head {head} predicts {ends} times what was measured"
    return False, f"predicts {worst:.2f} times what was measured, at some times"


def ratios_of(record: object, head: str) -> list[float] | None:
    """Predicted / measured by time; a history is anybody's JSON, so that what does not fit counts as not there."""
    entry = record.get(head) if isinstance(record, Mapping) else None
    ratios = entry.get("ratio") if isinstance(entry, Mapping) else None
    if not isinstance(ratios, list) or not ratios or not all(isinstance(ratio, int | float) for ratio in ratios):
        return None
    return [float(ratio) for ratio in ratios]


def _without_head(possible: list[str], purpose: str, why: str) -> Recommendation:
    if purpose == "images":
        name = "analytic" if "analytic" in possible else "beta_tilde"
        return Recommendation(name, why, _image_method(name))
    name = next((name for name in ("npr_isotropic", "analytic") if name in possible), "beta")
    return Recommendation(name, why)


def _image_method(covariance: str) -> str:
    """The row with the forward process of the default method."""
    default = METHODS[DEFAULT_METHOD]
    return next(m.name for m in METHODS.values() if (m.covariance, m.eta) == (covariance, default.eta))
