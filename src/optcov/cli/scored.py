"""What `bpd` and `trajectory` share: the images they score, and what they tell of clamps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from optcov.cli.console import announce

if TYPE_CHECKING:
    from optcov.bundle import Bundle
    from optcov.bundle.scoring import Scored


def some_images(data: str, model: Bundle, split: str, count: int) -> Scored:
    """The first images of a split, in an order whose first stand for all."""
    from optcov.bundle.scoring import Scored
    from optcov.data import load_mixed
    from optcov.data.tensors import fitted_to

    return Scored(fitted_to(load_mixed(data, split), model.image_shape, model.name), count, split)


def tell_clamps(rates: Mapping[str, tuple[float, float]]) -> None:
    """Say how many variances of each covariance were out of bounds."""
    from optcov.covariances import clamped_in_words

    for name, (below, above) in rates.items():
        if below or above:
            announce(f"{name}: {clamped_in_words(name, below, above)}")
