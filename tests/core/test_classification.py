"""The bound as a classifier, against Bayes' rule on a mixture whose class posterior is known."""

from __future__ import annotations

import math

import pytest
import torch

from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, oracle
from optcov.likelihood import Classification, class_bounds

LINEAR = Schedule.linear()
# three Gaussians with equal weights, near enough that Bayes' rule itself errs
DATA = oracle.GaussianMixture(
    [1 / 3] * 3,
    [[-0.5, 0.0], [0.5, 0.1], [0.1, 0.7]],
    [[[0.15, 0.0], [0.0, 0.1]], [[0.1, 0.0], [0.0, 0.1]], [[0.2, 0.05], [0.05, 0.1]]],
    labels=[0, 1, 2],
)
PROCESS = ReverseProcess(DATA.network(LINEAR), ForwardProcess(LINEAR), "npr_full", None)


def log_probabilities(x_0, steps, seed=0):
    trajectory = Trajectory.even(LINEAR, steps)
    bounds = class_bounds(PROCESS, x_0, trajectory, range(3), seed=seed, last_variance="own")
    return (-bounds).log_softmax(1)


def test_probabilities_approach_the_exact_posterior_as_steps_grow():
    """The bound of a Gaussian is exact; what is left is the noise, which averages out over the steps."""
    x_0 = DATA.sample(200, seed=1)
    exact = DATA.class_log_probabilities(x_0, LINEAR, 0).exp()
    errors = [float((log_probabilities(x_0, K).exp() - exact).abs().mean()) for K in (20, 200)]
    assert errors[1] < 0.7 * errors[0]
    assert errors[1] < 0.06


def test_accuracy_is_that_of_bayes_rule_within_its_error():
    x_0, labels = DATA.sample_labelled(400, seed=2)
    found = Classification.of(log_probabilities(x_0, 60), labels)
    best = Classification.of(DATA.class_log_probabilities(x_0, LINEAR, 0), labels)
    assert abs(found.accuracy.mean - best.accuracy.mean) < 2 * best.accuracy.standard_error
    assert best.calibration_error < 0.1
    assert found.calibration_error < 0.12


def test_all_classes_see_the_same_noise():
    """Two equal classes are a tie to the last digit."""
    twins = oracle.GaussianMixture([0.5, 0.5], [[0.1, 0.2]] * 2, [0.2, 0.2], labels=[0, 1])
    process = ReverseProcess(twins.network(LINEAR), ForwardProcess(LINEAR), "npr", None)
    bounds = class_bounds(process, twins.sample(8), Trajectory.even(LINEAR, 4), [0, 1])
    torch.testing.assert_close(bounds[:, 0], bounds[:, 1], rtol=1e-12, atol=1e-12)


def test_ties_are_images_whose_gap_is_within_the_error_of_the_bound():
    x_0, labels = DATA.sample_labelled(100, seed=3)
    repeats = torch.stack([log_probabilities(x_0, 10, seed) for seed in range(4)])
    found = Classification.of(repeats, labels)
    assert found.ties.shape == (100,)
    assert 0 < int(found.ties.sum()) < 60
    sure = DATA.class_log_probabilities(x_0, LINEAR, 0).exp().max(1).values
    assert float(sure[found.ties].mean()) < float(sure[~found.ties].mean())
    assert Classification.of(repeats[0], labels).ties is None
    assert "images tie" in str(found)


def test_accuracy_and_calibration_of_known_answers():
    answers = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.3, 0.7]]).log()
    found = Classification.of(answers, torch.tensor([0, 1, 1, 1]))
    assert found.accuracy.mean == 0.75
    assert found.accuracy.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert found.predicted.tolist() == [0, 0, 1, 1]
    assert found.calibration_error == pytest.approx((abs(1.8 - 1) + abs(0.8 - 1) + abs(0.7 - 1)) / 4, abs=1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 3, 2, 2), (5, 3)])
def test_answers_that_do_not_belong_to_the_labels_are_refused(shape):
    with pytest.raises(ValueError, match="do not belong together"):
        Classification.of(torch.zeros(shape), torch.zeros(4))
