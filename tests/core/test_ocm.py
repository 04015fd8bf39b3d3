"""Optimal covariance matching: probes of the Jacobian against the exact one, on the oracle and on a small network."""

from __future__ import annotations

import math

import pytest
import torch

from optcov import METHODS, ForwardProcess, ReverseProcess, Schedule, Trajectory, cost_table, elbo, oracle, sample
from optcov.covariances import Ocm
from optcov.covariances.jacobian import ProbedNetwork, clean_variance, probed_diagonal, random_signs
from optcov.inverse import Identity, restore
from optcov.networks import Backbone, HeadedNetwork
from optcov.prediction import NoisePrediction, Prediction

DATA = oracle.GaussianMixture(
    [0.4, 0.6],
    [[-0.5, 0.2, 0.0, 0.3], [0.6, 0.1, -0.2, 0.0]],
    [
        [[0.3, 0.1, 0.0, 0.0], [0.1, 0.2, 0.05, 0.0], [0.0, 0.05, 0.1, 0.0], [0.0, 0.0, 0.0, 0.4]],
        [[0.1, 0.0, 0.0, 0.05], [0.0, 0.4, 0.2, 0.0], [0.0, 0.2, 0.3, 0.0], [0.05, 0.0, 0.0, 0.2]],
    ],
)
HADAMARD = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64)
SCHEDULES = [Schedule.linear(), Schedule.vp_sde(), Schedule.edm(), Schedule.flow()]


def points(count=5):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def hadamard_variance(network, schedule, x_t, t, unit):
    levels = schedule.levels(t)
    x = x_t.clone().requires_grad_()
    answer = Prediction.of(network(x, t), x, t, *levels)
    diagonal = probed_diagonal(answer.clean, x, [row.expand_as(x) for row in HADAMARD])
    return clean_variance(answer.without_graph(), diagonal, unit) * answer.factor(unit)


@pytest.mark.parametrize("unit", ["noise", "velocity"])
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction", "flow_prediction"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_probes_of_a_hadamard_matrix_give_the_exact_variance(schedule, kind, unit):
    network = DATA.network(schedule, prediction_type=kind)
    for t in schedule.grid([1, 300, 700, 990]):
        x_t = schedule.unit_data_std(t) * points()
        exact = DATA.clean_moments(x_t, schedule, t).covariance.diagonal(dim1=-2, dim2=-1)
        found = hadamard_variance(network, schedule, x_t, t, unit)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_many_probes_at_run_time_approach_the_exact_posterior(schedule):
    t, x_t, probes = schedule.grid([500])[0], points(), 1000
    x_t = schedule.unit_data_std(t) * x_t
    exact = DATA.clean_moments(x_t, schedule, t)
    process = ReverseProcess(DATA.network(schedule), ForwardProcess(schedule), "ocm", None, ocm_probes=probes)
    found = process.posterior(x_t, t)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-9, atol=1e-9)
    off_diagonal = exact.covariance.square().sum(2) - exact.covariance.diagonal(dim1=-2, dim2=-1).square()
    error = (found.variance - exact.covariance.diagonal(dim1=-2, dim2=-1)) / (off_diagonal / probes).sqrt()
    assert float(error.abs().max()) < 5  # standard errors
    assert float(error.abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["sample", "v_prediction", "flow_prediction"])
def test_where_no_signal_is_left_probes_see_the_time_before(kind):
    schedule, x_t = Schedule.flow(), points()
    t = torch.tensor([1.0, 0.5, 1.0, 0.9, 1.0], dtype=torch.float64)
    process = ReverseProcess(
        DATA.network(schedule, prediction_type=kind), ForwardProcess(schedule), Ocm(probes=4000), None
    )
    exact = DATA.clean_moments(x_t, schedule, t)
    found = process.posterior(x_t, t)
    torch.testing.assert_close(found.mean, exact.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.variance, exact.covariance.diagonal(dim1=-2, dim2=-1), rtol=0, atol=0.02)


def test_probes_depend_on_the_seed_and_the_images_number_alone():
    schedule = Schedule.linear()
    process = ReverseProcess(DATA.network(schedule), ForwardProcess(schedule), Ocm(probes=2), None)
    trajectory = Trajectory.even(schedule, 4)
    together = sample(process, trajectory, (6, 4), seed=3)
    apart = torch.cat([sample(process, trajectory, (2, 4), seed=3, indices=pair) for pair in ([0, 1], [2, 3], [4, 5])])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together, sample(process, trajectory, (6, 4), seed=4), atol=1e-2)
    few, many = (random_signs(0, [7], [500], count, (3, 5)) for count in (2, 6))
    assert torch.equal(few, many[:2])
    assert set(many.flatten().tolist()) == {-1, 1}
    assert not torch.equal(many, random_signs(0, [7], [499], 6, (3, 5)))
    assert not torch.equal(many, random_signs(0, [8], [500], 6, (3, 5)))


def test_negative_estimates_are_set_to_zero_and_counted():
    correlated = [[0.3 if i == j else 0.29 for j in range(3)] for i in range(3)]
    data = oracle.GaussianMixture([1.0], [[0.0] * 3], [correlated])
    schedule = Schedule.linear()
    process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "ocm", None, ocm_probes=1)
    found = process.posterior(torch.randn(50, 3, dtype=torch.float64), 700).variance
    assert float(found.min()) == 0
    assert process.bounds.total == 150
    assert process.bounds.below == int((found == 0).sum()) > 10
    drawn = sample(process, Trajectory.even(schedule, 5), (20, 3))
    assert bool(drawn.isfinite().all())
    assert process.bounds.total == 150 + 5 * 60  # sampling counts in the same place


def test_a_bound_by_probes_depends_on_the_image_and_not_on_the_batch():
    schedule = Schedule.linear()
    process = ReverseProcess(DATA.network(schedule), ForwardProcess(schedule), "ocm", None, ocm_probes=1)
    x_0, trajectory = DATA.sample(6), Trajectory((1, 500, 1000))
    whole = elbo(process, x_0, trajectory, seed=7).total
    parts = [elbo(process, x_0[i : i + 1], trajectory, seed=7, images=[i]).total for i in range(6)]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=0)
    for batch_size in (1, 4):
        table = cost_table(process, x_0, ["ocm"], times=trajectory.times, seed=7, batch_size=batch_size, groups=6)
        found = table.group_bits_per_dim("ocm", trajectory) * 4 * math.log(2)
        torch.testing.assert_close(found, whole, rtol=1e-7, atol=0)


def test_the_state_of_a_sweep_by_probes_knows_the_network_and_the_probes(tmp_path):
    def swept(seed, probes):
        network = HeadedNetwork(Backbone(Dense(seed), tap="out"), Schedule.linear()).eval()
        process = ReverseProcess(network, ForwardProcess(Schedule.linear()), "ocm", None, ocm_probes=probes)
        return cost_table(process, DATA.sample(4).float(), ["ocm"], times=(500, 1000), state=tmp_path / "state")

    swept(0, 2)
    with pytest.raises(ValueError, match="the weights of the network changed"):
        swept(1, 2)
    with pytest.raises(ValueError, match="ocm probes changed from 2 to 3"):
        swept(0, 3)


class Dense(torch.nn.Module):
    """A small network of vectors."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x, time):
        return self.out(torch.tanh(self.body(x)))


def test_a_restoration_by_the_covariance_that_a_process_has_probes_once():
    asked = []

    def network(x_t, t):
        asked.append(len(x_t))
        return DATA.network(Schedule.linear())(x_t, t)

    prior = ReverseProcess(network, ForwardProcess(Schedule.linear()), "ocm", None, ocm_probes=2)
    found = {}
    for method in (None, "ocm"):
        asked.clear()
        options = {"steps": 2, "samples": 1, "way": "proximal", "method": method, "progress": False}
        samples = restore(prior, torch.zeros(4, dtype=torch.float64), Identity((4,)), 0.1, **options).samples
        found[method] = (len(asked), samples)
    assert found["ocm"][0] == found[None][0] == 2
    assert torch.equal(found["ocm"][1], found[None][1])


@pytest.mark.parametrize("row", ["OCM-DDPM", "OCM-DDIM"])
def test_the_rows_step_by_the_head_or_by_probes(row):
    schedule, x_t = Schedule.linear(), points()
    head = METHODS[row].reverse_process(DATA.network(schedule), schedule, None)
    probes = METHODS[row].reverse_process(DATA.network(schedule), schedule, None, ocm_probes=4000)
    exact = DATA.reverse_moments(x_t, head.forward, 500, 400).covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(head.step(x_t, 500, 400).variance, exact, rtol=1e-9, atol=0)
    torch.testing.assert_close(probes.step(x_t, 500, 400).variance, exact, rtol=0.15, atol=0)


def test_gradients_through_the_mean_survive_probing():
    schedule = Schedule.linear()
    process = ReverseProcess(DATA.network(schedule), ForwardProcess(schedule), Ocm(probes=1), None)
    plain = ReverseProcess(DATA.network(schedule), ForwardProcess(schedule), "beta_tilde", None)
    grads = []
    for each in (process, plain):
        x = points().requires_grad_()
        grads.append(torch.autograd.grad(each.posterior(x, 300).mean.sum(), x)[0])
    torch.testing.assert_close(grads[0], grads[1])
    with torch.no_grad():
        assert not process.posterior(points(), 300).mean.requires_grad


def test_the_jacobian_of_a_small_network_is_found_pixel_by_pixel():
    """64 rows of a Hadamard matrix for 64 pixels, against the Jacobian that torch computes."""
    from small_bundles import small_unet

    unet, x = small_unet(3), torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    times = torch.tensor([300.0, 300.0])
    hadamard = torch.ones(1, 1)
    for _ in range(6):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    found = probed_diagonal(unet(x, times).sample, x, [row.reshape(1, 1, 8, 8).expand_as(x) for row in hadamard])
    for image in range(2):
        one = x[image : image + 1].detach()
        full = torch.autograd.functional.jacobian(lambda y: unet(y, times[:1]).sample, one).reshape(64, 64)
        torch.testing.assert_close(found[image].flatten(), full.diagonal(), rtol=1e-3, atol=1e-5)


def test_a_whole_number_of_probes_may_be_a_float_and_the_batch_empty():
    for probes in (2, 2.0):
        process = ReverseProcess(
            DATA.network(SCHEDULES[0]), ForwardProcess(SCHEDULES[0]), "ocm", None, ocm_probes=probes
        )
        assert process.step(DATA.sample(3), 100, 50).variance.shape[0] == 3
        assert process.step(DATA.sample(3)[:0], 100, 50).variance.shape[0] == 0


@pytest.mark.parametrize("probes", [0, -1, 1.5, "8", 2**20])
def test_a_number_of_probes_that_is_none_is_refused(probes):
    with pytest.raises(ValueError, match=r"^ocm_probes = .* is not a whole number from 1"):
        Ocm(probes=probes)


def test_bad_input_is_named():
    schedule = Schedule.linear()
    forward = ForwardProcess(schedule)
    with pytest.raises(ValueError, match=r"ocm_probes belongs to the covariance \"ocm\", not to 'npr'"):
        ReverseProcess(DATA.network(schedule), forward, "npr", ocm_probes=8)
    with pytest.raises(ValueError, match=r"seed = 'a' is not a whole number"):
        Ocm(probes=8, seed="a")
    with pytest.raises(ValueError, match=r"needs the head 'ocm'"):
        ReverseProcess(lambda x, t: NoisePrediction(x), forward, "ocm").posterior(points(), 5)
    blind = ProbedNetwork(lambda x, t: NoisePrediction(x.detach() * 0), forward, 1, 0)
    with pytest.raises(ValueError, match=r"there are no probes"):
        probed_diagonal(points(), points(), [])
    assert bool(blind(points(), 5).heads["ocm"].isfinite().all())  # x0_hat depends on x_t by its formula all the same
    frozen = ReverseProcess(
        lambda x, t: Prediction(x, t, x.detach(), "sample", *forward.levels(t)), forward, Ocm(probes=1)
    )
    with pytest.raises(ValueError, match=r"keeps no gradient from x_t to its output"):
        frozen.posterior(points(), 5)
