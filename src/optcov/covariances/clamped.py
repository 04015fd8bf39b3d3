"""What was clamped, in words: how much of it, what became of it, and whether that is bad."""

from __future__ import annotations

from optcov.covariances.base import Covariance

# shares of negative variances: up to the first, setting them to 0 changes the mean variance by less than a twentieth,
# from the second on by more than a tenth (docs/faq.md)
FEW_NEGATIVE, MANY_NEGATIVE = 0.1, 0.2
MANY_ABOVE = 0.5
USUAL = ", as is usual at the noisiest times"
MANY = ": so many are a sign of a network that was hardly trained, or of images unlike its own"


def clamped_in_words(covariance: str, below: float, above: float) -> str:
    """Say which shares of a covariance's estimates were out of bounds, what became of them, and whether it is bad."""
    if not Covariance.registry[covariance].has_posterior:
        return (
            f"{_percent(below)} of the learned places lay below the range, {_percent(above)} above it; they were moved "
            f"to its ends, inside which a well trained network stays by itself"
        )
    parts = []
    if below:
        parts.append(f"{_percent(below)} of the variances were negative and were set to 0{_verdict(covariance, below)}")
    if above:
        parts.append(
            f"{_percent(above)} {'' if below else 'of the variances '}were larger than data in this range can have and "
            f"were lowered to that{USUAL if above < MANY_ABOVE else MANY}"
        )
    return "; ".join(parts) or "no variance was out of bounds"


def _verdict(covariance: str, below: float) -> str:
    if below < FEW_NEGATIVE:
        return f": harmless below {FEW_NEGATIVE:.0%}"
    # a head of the paper's loss may be negative too, one of the default loss may not
    better = "heads fitted without --paper-exact" if covariance.startswith("npr") else "NPR"
    if covariance == "ocm":
        better = "more probes, or NPR"
    if below < MANY_NEGATIVE:
        return f", which adds some noise: compare with {better}"
    return f", which adds much noise: prefer {better}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
