"""Optimal covariance matching (OCM, ICLR 2025): the covariance that the network's own Jacobian implies.

v = (beta_bar / a) diag(d x0_hat / d x_t), which for predicted noise is k (1 - sqrt(beta_bar) diag(d eps_hat / d x_t)).
It is exact if the mean is, and is read from a head that was fitted on probes, or from probes at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from optcov.covariances.base import Covariance, Example, Regression, Row
from optcov.covariances.jacobian import ProbedNetwork, clean_variance
from optcov.forward import ForwardProcess
from optcov.gaussian import CovarianceShape, Diagonal, mean_square, per_sample
from optcov.prediction import Network, Prediction
from optcov.schedule import check_whole, is_whole

MOST_PROBES = 2**16
NEIGHBOURS = 8.0  # how many pixels' worth of off-diagonal covariance a probe is taken to carry, see `regression`


@final
class Ocm(Covariance):
    """v = (beta_bar / a) diag(d x0_hat / d x_t).

    probes: None reads the head "ocm". A number probes the network's Jacobian so often at every step, by signs that
    depend on the seed and the image's number; each probe costs a backward pass. An estimate from few probes may be
    negative: it is set to 0, and counted.
    """

    name = "ocm"
    head = "ocm"
    unit = "velocity"
    target_can_be_negative = True
    target_spread_known = True
    needs_probe = True
    rows = (Row("OCM-DDPM", 1.0, noise_cap=1.0), Row("OCM-DDIM", 0.0, noise_cap=1.0))

    def __init__(self, probes: int | None = None, seed: int = 0):
        if probes is not None and (not is_whole(probes) or not 1 <= probes <= MOST_PROBES):
            raise ValueError(
                f"ocm_probes = {probes!r:.80} is not a whole number from 1 to {MOST_PROBES}; pass one such as 8"
            )
        self.probes, self.seed = None if probes is None else int(probes), check_whole("seed", seed)

    def asking(
        self, network: Network, forward: ForwardProcess, seed: int | None = None, indices: Sequence[int] | None = None
    ) -> Network:
        """The network with probes, if there are any."""
        if self.probes is None:
            return network
        return ProbedNetwork(network, forward, self.probes, self.seed if seed is None else seed, indices)

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        return Diagonal(prediction.head_in_clean_units("ocm"))

    @classmethod
    def regression(cls, example: Example, unit: str) -> Regression:
        """One probe y, whose mean is the variance g but which may be negative.

        With G the covariance matrix, y_i = g_i + sum_j G_ij z_i z_j over the other pixels j, of variance sum_j G_ij^2.
        Since G_ij^2 = rho_ij^2 g_i g_j, that is g_i times what the neighbours carry: the variance function is taken as
        A g + 2 g^2, with A some neighbours' worth of the sample's mean square residual. Any A has the same minimiser.
        Samples at times without signal, where the Jacobian says nothing, are left out.
        """
        if example.probe is None:
            raise ValueError("the head 'ocm' is fitted on probes of the Jacobian, but this example has none")
        seen = example.prediction.signal > 0
        target = clean_variance(example.prediction, example.probe, unit)
        target = torch.where(per_sample(seen, target) > 0, target, 0)
        plain = Regression.plain(target)
        scale = NEIGHBOURS * mean_square(example.residual(unit)).to(target)
        weight = seen.double().expand(len(target))
        return Regression(target, plain.offset, plain.slope, weight, per_sample(scale, target).expand_as(target))
