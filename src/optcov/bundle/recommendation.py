"""Which covariances a bundle can do, and which of them to use, by what its own calibration measured.

A head counts as good if on held-out images it predicts 0.8 to 1.25 times what was measured, in every tenth of the
times. A few held-out images cannot tell: a ratio outside counts only if its own error does not explain it. A head that
was not calibrated is taken at its word. One that is not good gives way: to the next head, and at last to one number per
time, which is right on average by its definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard, final

from optcov.bundle.bundle import Bundle
from optcov.covariances import Covariance, find_covariance
from optcov.methods import DEFAULT_METHOD, HEAD_METHOD, METHODS

GOOD = (0.8, 1.25)  # predicted / measured
ERRORS = 3.0  # standard errors that a ratio may lie outside
IMAGES = "it is for 5 to 10 steps and needs no head (docs/few-steps.md)"
HEADS = ("npr", "sn", "ocm")  # in the order in which they are tried; NPR is right for the mean that the network has


@final
@dataclass(frozen=True)
class Recommendation:
    """What to use for a purpose: a covariance, or a method that needs none."""

    name: str
    why: str  # a phrase


def possible_covariances(bundle: Bundle) -> list[str]:
    """Names of those whose head, number per time and spectrum are there, or that need none."""
    heads = {*bundle.heads, *bundle.network.output_heads}
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
    best = best_covariance(bundle)
    # pixels that are correlated need fewer bits, see docs/covariances.md
    correlated = f"{best.name}_correlated" if best.name in HEADS else "spectral"
    scored = replace(best, name=correlated) if correlated in possible_covariances(bundle) else best
    row = head_method(bundle)
    with_noise = find_covariance(str(METHODS[row].covariance)).row_at(1.0)
    beside = f"; of the methods with a head, compare {row} with {with_noise}"
    images = IMAGES + (beside if bundle.heads else "")
    return {"images": Recommendation(DEFAULT_METHOD, images), "likelihood": scored, "uncertainty": best}


def best_covariance(bundle: Bundle) -> Recommendation:
    """That of the first good head, or else one number per time."""
    possible, doubts = possible_covariances(bundle), []
    for name in HEADS:
        if name in possible:
            good, words = judged(bundle, name)
            if good:
                return Recommendation(name, words)
            doubts.append(f"the head {name} {words}")
    name = next((name for name in ("npr_isotropic", "analytic") if name in possible), "beta")
    return Recommendation(name, "; ".join(doubts) or "there is no head")


def head_method(bundle: Bundle) -> str:
    """The row that draws by the best head: NPR-DDIM, if that head is good or no other is better."""
    head, default = best_covariance(bundle).name, METHODS[HEAD_METHOD]
    wanted = head if head in HEADS else default.covariance
    return next(m.name for m in METHODS.values() if (m.covariance, m.eta) == (wanted, default.eta))


def judged(bundle: Bundle, head: str) -> tuple[bool, str]:
    """Whether a head is good as far as is known, and why."""
    if find_covariance(head).about == "prediction" and bundle.heads[head].about == "zero":
        return False, "is a small difference of large numbers, which no calibration of the large ones shows"
    found = ratios_of(bundle.provenance.get("calibration"), head)
    if found is None:
        return True, f"the head {head} is there; it was not calibrated"
    ratios = [ratio for ratio, _ in found]
    if all(GOOD[0] - ERRORS * error <= ratio <= GOOD[1] + ERRORS * error for ratio, error in found):
        ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
        return True, f"on held-out images the head {head} predicts {ends} times what was measured"
    worst = max(found, key=lambda part: max(GOOD[0] - part[0], part[0] - GOOD[1]) - ERRORS * part[1])[0]
    return False, f"predicts {worst:.2f} times what was measured, at some times"


def ratios_of(record: object, head: str) -> list[tuple[float, float]] | None:
    """Predicted / measured by time, with standard errors, 0 where none are known.

    A history is anybody's JSON, so that what does not fit counts as not there.
    """
    entry = record.get(head) if isinstance(record, Mapping) else None
    ratios, errors = (entry.get(name) if isinstance(entry, Mapping) else None for name in ("ratio", "error"))
    if not _numbers(ratios):
        return None
    known = errors if _numbers(errors) and len(errors) == len(ratios) else [0.0] * len(ratios)
    return [(float(ratio), abs(float(error))) for ratio, error in zip(ratios, known, strict=True)]


def _numbers(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and bool(values) and all(isinstance(value, int | float) for value in values)
