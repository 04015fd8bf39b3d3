"""Guidance mixes two predictions, exactly, and leaves the heads of the conditional one; likelihoods refuse it."""

from __future__ import annotations

import pytest
import torch

from class_mixture import MIXTURE
from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, cost_table, elbo, sample
from optcov.likelihood import ode_likelihood
from optcov.networks.guidance import Guided
from optcov.prediction import Prediction

LINEAR, VP = Schedule.linear(), Schedule.vp_sde()
EMPTY = {"class_labels": torch.tensor([2])}
LABELS = torch.tensor([0, 1, 1, 0, 1])
X_T = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NONE = torch.full((5,), 2)


class Counted:
    """A network that remembers the size of each batch."""

    def __init__(self, schedule=LINEAR):
        self.network, self.batches = MIXTURE.network(schedule), []

    def __call__(self, x_t, t, **condition):
        self.batches.append(len(x_t))
        return self.network(x_t, t, **condition)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 2.0, 7.5])
@pytest.mark.parametrize("t", [300, torch.tensor([10, 200, 300, 700, 1000])])
def test_the_output_is_empty_plus_the_weighted_difference_in_one_batch(guidance, t):
    network = Counted()
    found = Guided(network, guidance, EMPTY)(X_T, t, class_labels=LABELS)
    own, empty = (MIXTURE.network(LINEAR)(X_T, t, class_labels=told) for told in (LABELS, NONE))
    torch.testing.assert_close(found.noise, empty.noise + guidance * (own.noise - empty.noise), rtol=1e-9, atol=1e-9)
    for name in ("sn", "npr"):
        torch.testing.assert_close(found.heads[name], own.heads[name], rtol=1e-10, atol=1e-12)
    assert network.batches == [10]


@pytest.mark.parametrize("covariance", ["npr", "sn", "sn_full", "npr_full", "range"])
def test_the_covariance_is_that_of_the_conditional_prediction(covariance):
    """SN too, whose second moment is about the squared prediction: not the guided one."""
    plain = ReverseProcess(MIXTURE.network(LINEAR), ForwardProcess(LINEAR), covariance, None)
    guided = ReverseProcess(Guided(MIXTURE.network(LINEAR), 4.0, EMPTY), ForwardProcess(LINEAR), covariance, None)
    one, other = (process.step(X_T, 500, 300, class_labels=LABELS) for process in (plain, guided))
    torch.testing.assert_close(other.variance, one.variance, rtol=1e-9, atol=1e-12)
    assert float((other.mean - one.mean).abs().max()) > 1e-2


def test_every_kind_of_output_is_guided_alike():
    signal, spread = LINEAR.levels(400)
    own, empty = (MIXTURE.network(LINEAR)(X_T, 400, class_labels=told).noise for told in (LABELS, NONE))
    expected = empty + 3 * (own - empty)
    for kind in ("epsilon", "sample", "v_prediction"):
        from optcov.prediction import output_of

        def network(x_t, t, class_labels, kind=kind):
            noise = MIXTURE.network(LINEAR)(x_t, t, class_labels=class_labels).noise
            clean = (x_t - spread * noise) / signal
            return Prediction(x_t, t, output_of(kind, clean, noise, signal, spread), kind, signal, spread)

        found = Guided(network, 3.0, EMPTY)(X_T, 400, class_labels=LABELS)
        torch.testing.assert_close(found.noise, expected, rtol=1e-8, atol=1e-8)


def test_guidance_moves_samples_towards_their_class():
    def drawn(guidance):
        network = Guided(MIXTURE.network(LINEAR), guidance, EMPTY)
        process = ReverseProcess(network, ForwardProcess(LINEAR, 0.0), "npr", None)
        labels = torch.zeros(400, dtype=torch.int64)
        return sample(process, Trajectory.even(LINEAR, 20), (400, 2), condition={"class_labels": labels})

    sure = [float(MIXTURE.class_log_probabilities(drawn(w), LINEAR, 0)[:, 0].mean()) for w in (1.0, 3.0)]
    assert sure[1] > sure[0]


@pytest.mark.parametrize("guidance", [float("nan"), float("inf"), -0.5, "3", None, True])
def test_a_weight_that_is_none_is_named(guidance):
    with pytest.raises(ValueError, match="guidance = .* is no weight"):
        Guided(MIXTURE.network(LINEAR), guidance, EMPTY)


def test_guidance_asks_for_both_conditions():
    with pytest.raises(ValueError, match="needs an empty condition"):
        Guided(MIXTURE.network(LINEAR), 2.0, {})
    guided = Guided(MIXTURE.network(LINEAR), 2.0, EMPTY)
    with pytest.raises(ValueError, match="none is given; pass class_labels"):
        guided(X_T, 500)
    with pytest.raises(ValueError, match="condition 'other' has entries of shape .* but there is none"):
        guided(X_T, 500, other=torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"the empty one has \(\)"):
        guided(X_T, 500, class_labels=torch.zeros(5, 3))


def test_likelihoods_refuse_guidance_other_than_1():
    told = {"class_labels": LABELS}
    guided = Guided(MIXTURE.network(LINEAR), 2.0, EMPTY)
    plain = ReverseProcess(guided, ForwardProcess(LINEAR), "npr", None)
    probed = ReverseProcess(guided, ForwardProcess(LINEAR), "ocm", None, ocm_probes=1)
    for process in (plain, probed):
        with pytest.raises(ValueError, match="guidance = 2 has no likelihood"):
            elbo(process, X_T, Trajectory.even(LINEAR, 5), condition=told)
        with pytest.raises(ValueError, match="guidance = 2 has no likelihood"):
            cost_table(process, X_T, ["npr"], condition=told, times=[500, 1000])
    with pytest.raises(ValueError, match="guidance = 2 has no likelihood"):
        ode_likelihood(Guided(MIXTURE.network(VP), 2.0, EMPTY), VP, X_T, None, condition=told)
