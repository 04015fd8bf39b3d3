"""What each head learns: a head with the covariance that it is for, which knows its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from optcov.covariances import Covariance, Example, Regression, of_head
from optcov.networks.heads import Head


@final
@dataclass(frozen=True)
class HeadTask:
    """A head with what it learns."""

    module: Head
    covariance: type[Covariance]

    def regression(self, example: Example) -> Regression:
        """What the head is fitted on, in its unit."""
        if self.module.about == "prediction":
            return self.covariance.excess_regression(example, self.module.unit)
        return self.covariance.regression(example, self.module.unit)

    def scale(self, example: Example, regression: Regression) -> Tensor:
        """The order of the target of each sample, (B,), float64: what a timed head is relative to."""
        if self.module.about == "prediction":  # whose target may be negative
            return example.residual(self.module.unit).double().square().flatten(1).mean(1)
        return regression.target.double().flatten(1).mean(1)


def head_task(name: str, module: Head) -> HeadTask:
    """The task of a head by its name."""
    return HeadTask(module, of_head(name))
