"""Costs of a covariance that correlates pixels, at the nodes of a time's profile.

Its step is gamma^2 v.affine(1, a), for v the second moment and a = lambda^2 / gamma^2 of the step: a function of a
alone, also in the fast form of `gaussian.Correlated`. So one evaluation of the network serves every s here, too. The
cost is computed exactly at each node in a, image by image, and interpolated between them as that of all others is.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from optcov.gaussian import CovarianceShape, sum_pixels
from optcov.likelihood.profile import Nodes


@final
class NodeSums:
    """Sums over images at the nodes, by group of images: (1 + E, G, n), as `profile` has them.

    A alone, which vanishes with v / a, would be a difference of large numbers. A + B/2 and B/2 are kept in the places
    of A and B; their logarithms are as smooth.
    """

    def __init__(self, nodes: Nodes, groups: int, error_terms: int):
        self.ratios = nodes.log_ratio.exp()
        self.sums = torch.zeros(1 + error_terms, groups, len(self.ratios), dtype=torch.float64)

    def add(self, v: CovarianceShape, difference: Tensor, clipped_off: Tensor | None, group: Tensor) -> None:
        """Add images: v, the errors x_0 - x0_hat (B, *D), what clipping took off x0_hat, and the group of each (B,)."""
        one, groups = torch.ones((), dtype=torch.float64), group.cpu()
        for number, a in enumerate(self.ratios):
            step = v.affine(one, a)
            trace = a * sum_pixels(step.inverse_diagonal(difference).expand_as(difference))
            volume = step.log_det(difference) - difference[0].numel() * math.log(float(a))
            shape = 0.5 * (trace - difference[0].numel() + volume)
            square = 0.5 * step.inverse_quadratic(difference)
            parts = [shape + square / 2, square / 2]
            if clipped_off is not None:
                other = 0.5 * step.inverse_quadratic(clipped_off)
                together = 0.5 * step.inverse_quadratic(difference + clipped_off)
                parts += [(together - square - other) / 2, other]
            for part, values in enumerate(parts):
                self.sums[part, :, number].index_add_(0, groups, values.cpu())

    def profile(self, nodes: Nodes) -> Tensor:
        """Sums at the nodes, (1 + E, G, n)."""
        assert len(nodes.log_ratio) == len(self.ratios)
        return self.sums
