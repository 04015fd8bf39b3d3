"""The sweep: what it costs, that it equals the bound it stands for, and that it stops, goes on and splits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, oracle
from optcov.covariances import Analytic, IsotropicResidual, LearnedRange, Ocm, Spectrum
from optcov.gaussian import Basis
from optcov.likelihood import Sweep, cost_table, elbo, even_on_grid, merge
from optcov.likelihood.accumulate import Sums
from optcov.likelihood.costs import TimeGrid
from optcov.likelihood.priced import PricedCovariances
from optcov.storage import read_tensors, write_tensors
from reference_bound import GOLDEN, MIXTURE, NOISE, X_0, reference_network, reference_process

ALL = ("beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr", "range")
IMAGES = (127.5 + 100 * torch.sin(torch.arange(6 * 16).double() ** 1.5)).round().reshape(6, 1, 4, 4) / 127.5 - 1


def score_by_elbo(process, table, covariance, images, trajectory, last_variance, **noise):
    exact = ReverseProcess(
        process.network,
        process.forward,
        covariance,
        process.data_range,
        clip_mean=process.bounds.clip_mean,
        mean_square_noise=table.mean_square_noise,
        mean_square_residual=table.mean_square_residual,
    )
    return float(elbo(exact, images, trajectory, last_variance=last_variance, **noise).bits_per_dim().mean())


@pytest.mark.parametrize(
    ("schedule", "eta", "data_range"),
    [
        (Schedule.linear(30), 1.0, (-1, 1)),
        (Schedule.linear(300, scale=False), 1.0, (-1, 1)),  # on a sub-grid
        (Schedule.cosine(30), 0.5, (-1, 1)),  # clipped x_0 beside raw noise
        (Schedule.cosine(30), 1.0, None),
    ],
)
def test_sweep_equals_the_bound_on_the_same_images_and_noise(schedule, eta, data_range):
    process = ReverseProcess(reference_network, ForwardProcess(schedule, eta), data_range=data_range)
    grid = range(12, 301, 12) if schedule.steps == 300 else None
    table = cost_table(process, IMAGES, times=grid, seed=3, batch_size=4, groups=3)
    assert table.covariances == (ALL if eta == 1 else tuple(d for d in ALL if d not in ("beta", "range")))
    times = table.grid.times
    for K, covariance in itertools.product((2, 9, len(times)), table.covariances):
        trajectory = Trajectory([times[round(i * (len(times) - 1) / (K - 1))] for i in range(K)])
        for last_variance in ("paper",) if K > 9 or covariance in ("analytic", "npr_isotropic") else ("paper", "own"):
            found = table.score(covariance, trajectory, last_variance).mean
            expected = score_by_elbo(process, table, covariance, IMAGES, trajectory, last_variance, seed=3)
            assert found == pytest.approx(expected, rel=1e-8), (covariance, K, last_variance)


def test_sweep_equals_the_bound_where_the_mean_is_clipped_in_the_last_step_alone():
    """From a late time, where the network's x_0 lies outside the range."""
    process = ReverseProcess(reference_network, ForwardProcess(Schedule.linear(30)), clip_mean=False)
    table = cost_table(process, IMAGES, ["npr", "range"], seed=3)
    for covariance, last_variance in itertools.product(table.covariances, ("paper", "own")):
        found = table.score(covariance, Trajectory([20, 30]), last_variance).mean
        expected = score_by_elbo(process, table, covariance, IMAGES, Trajectory([20, 30]), last_variance, seed=3)
        assert found == pytest.approx(expected, rel=1e-8), (covariance, last_variance)


def test_many_columns_are_interpolated_and_still_equal_the_bound():
    """More steps in a column than nodes: 250 times of the VP SDE."""
    schedule = Schedule.vp_sde()
    process = ReverseProcess(reference_network, ForwardProcess(schedule), data_range=(-1, 1))
    times = [i / 250 for i in range(1, 251)]
    table = cost_table(process, X_0, ["npr", "range"], times=times, groups=1, last_variances=["paper"])
    assert table.grid.nodes < 220
    trajectory = Trajectory([*times[:5], *times[10:245:23], *times[-2:]])
    for covariance in table.covariances:
        exact = ReverseProcess(reference_network, process.forward, covariance)
        terms = elbo(exact, X_0, trajectory)
        expected = torch.cat([terms.reconstruction[:, None], terms.transitions], 1).sum(0)
        torch.testing.assert_close(table.group_terms(covariance, trajectory)[:, 0], expected, rtol=1e-7, atol=0)


def test_small_pipeline_of_the_authors_is_reproduced():
    run = GOLDEN["small_N_pipeline"]["runs"]["linear_40 DDPM_small clip=True"]
    process = reference_process("beta_tilde", clip=True, steps=40)
    table = cost_table(
        process,
        X_0,
        ["beta_tilde"],
        noise=lambda t: NOISE,
        cdf="tanh",
        last_variances=["reference_table", "paper"],
    )
    costs = table.costs("beta_tilde", "reference_table")
    assert costs.shape == (41, 41)
    for s, row in enumerate(run["F_rows"]):
        np.testing.assert_allclose(costs[s, s + 1 :], row, rtol=1e-9)
    assert table.prior == pytest.approx(run["last_term"], rel=1e-9)
    best = table.optimal_all("beta_tilde", 40, "reference_table")
    for K, expected in run["paths"].items():
        path = best[int(K)]
        assert [0, *path.times] == expected["path"]
        assert path.cost(costs) == pytest.approx(expected["cost"], rel=1e-9)
        total = elbo(process, X_0, path, noise=lambda t: NOISE, cdf="tanh").total
        np.testing.assert_allclose(total.numpy(), expected["nelbo_dtdpm_total_on_path"], rtol=1e-9)
        bits = float(total.mean()) / 16 / math.log(2)
        assert table.score("beta_tilde", path, "paper").mean == pytest.approx(bits, rel=1e-9)


def test_the_optimal_bound_is_what_elbo_gives_and_never_worse_than_even():
    schedule = Schedule.linear(50)
    network = MIXTURE.network(schedule, error=0.05)
    process = ReverseProcess(network, ForwardProcess(schedule), data_range=None)
    x_0 = MIXTURE.sample(24, seed=1)
    table = cost_table(process, x_0, ["beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr"])
    for covariance in table.covariances:
        costs = table.costs(covariance)
        best = Trajectory.optimal_all(costs, 50)
        assert all(best[K].cost(costs) <= Trajectory.even(schedule, K).cost(costs) + 1e-9 for K in range(2, 51))
        found = table.score(covariance, best[6]).mean
        assert found == pytest.approx(
            score_by_elbo(process, table, covariance, x_0, best[6], "paper"), rel=1e-6, abs=1e-9
        )
        assert found == pytest.approx((best[6].cost(costs) + table.prior) / 2 / math.log(2), rel=1e-9, abs=1e-9)


def test_isotropic_residual_is_never_a_worse_bound_than_the_other_single_numbers():
    """On the images that the numbers were measured on, without clipping, for every step (DESIGN's table)."""
    schedule = Schedule.linear(30)
    process = ReverseProcess(MIXTURE.network(schedule, error=0.3), ForwardProcess(schedule), data_range=None)
    table = cost_table(process, MIXTURE.sample(50, seed=2))
    best = table.costs("npr_isotropic")[1:, 2:]
    for other in ("analytic", "beta", "beta_tilde"):
        worse = table.costs(other)[1:, 2:]
        steps = np.isfinite(best)
        assert (best[steps] <= worse[steps] * (1 + 1e-9)).all()


class Counted:
    def __init__(self, network):
        self.network, self.images = network, 0

    def __call__(self, x_t, t):
        self.images += len(x_t)
        return self.network(x_t, t)


def test_whole_likelihood_table_takes_one_evaluation_per_image_and_time():
    """7 covariances x 6 K x 2 trajectories from a sweep over training images and one over test images."""
    N = 20
    schedule = Schedule.linear(N, scale=False)
    network = Counted(reference_network)
    process = ReverseProcess(network, ForwardProcess(schedule))
    train = cost_table(process, IMAGES[:4])
    assert network.images == 4 * N
    chosen = {covariance: train.optimal_all(covariance, N) for covariance in train.covariances}
    test = cost_table(
        process,
        IMAGES[4:],
        mean_square_noise=train.mean_square_noise,
        mean_square_residual=train.mean_square_residual,
    )
    assert network.images == 6 * N
    scores = [
        test.score(covariance, trajectory).mean
        for covariance in test.covariances
        for K in (2, 3, 5, 8, 12, 20)
        for trajectory in (Trajectory.even(schedule, K), chosen[covariance][K])
    ]
    assert len(scores) == 7 * 6 * 2
    assert all(map(math.isfinite, scores))
    assert network.images == 6 * N


def test_a_sub_grid_forbids_the_times_that_it_left_out():
    schedule = Schedule.linear()
    process = ReverseProcess(reference_network, ForwardProcess(schedule))
    table = cost_table(process, X_0, ["npr"], times=[1, 100, 400, 1000])
    costs = table.costs("npr")
    assert costs.shape == (1001, 1001)
    assert np.isfinite(costs).sum() == 4 + 3 + 2 + 1
    assert Trajectory.optimal(costs, 4).times == (1, 100, 400, 1000)
    assert table.optimal_all("npr", 3)[3] == Trajectory.optimal(costs, 3)


@pytest.mark.parametrize("schedule", [Schedule.linear(), Schedule.vp_sde()], ids=["discrete", "continuous"])
def test_even_times_of_a_whole_grid_are_those_of_an_even_trajectory(schedule):
    """Halves, which every odd K meets, are rounded alike: the ET rows are the paper's."""
    grid = TimeGrid(ForwardProcess(schedule), Trajectory.even(schedule, 1000).times)
    for K in (2, 3, 5, 10, 25, 50, 99, 1000):
        assert even_on_grid(grid, K) == Trajectory.even(schedule, K)


def same_tables(one, other):
    assert one.covariances == other.covariances
    for name, value in one.sums.items():
        torch.testing.assert_close(value, other.sums[name], rtol=1e-9, atol=1e-12)


def test_result_does_not_depend_on_batches_and_shards_merge():
    schedule = Schedule.linear(12, scale=False)
    process = ReverseProcess(reference_network, ForwardProcess(schedule))
    whole = cost_table(process, IMAGES, groups=2)
    same_tables(whole, cost_table(process, IMAGES, groups=2, batch_size=1))
    shards = [cost_table(process, IMAGES, groups=2, batch_size=2, shard=(i, 3)) for i in range(3)]
    same_tables(whole, merge(shards))


def test_a_sweep_that_is_left_within_its_first_time_counts_no_image_twice():
    process = ReverseProcess(reference_network, ForwardProcess(Schedule.linear(12, scale=False)))
    sweep = Sweep(process, IMAGES, batch_size=2)
    for progress in sweep:
        if progress.done == 2:
            break
    for _ in sweep:
        pass
    same_tables(sweep.table, cost_table(process, IMAGES, batch_size=2))


def test_a_share_of_the_images_is_scored_by_the_groups_that_it_has():
    process = ReverseProcess(reference_network, ForwardProcess(Schedule.linear(12, scale=False)))
    trajectory = Trajectory((1, 6, 12))
    share = cost_table(process, IMAGES, shard=(0, 2)).score("npr", trajectory)  # images 0, 2 and 4 of 6
    whole = cost_table(process, IMAGES).group_bits_per_dim("npr", trajectory)  # an image in each group
    assert (share.count, share.mean) == (3, pytest.approx(float(whole[::2].mean()), rel=1e-9))
    assert share.standard_error == pytest.approx(float(whole[::2].std()) / 3**0.5, rel=1e-9)


def test_an_interrupted_sweep_goes_on_and_a_finished_one_is_not_repeated(tmp_path):
    schedule = Schedule.linear(12, scale=False)
    network = Counted(reference_network)
    process = ReverseProcess(network, ForwardProcess(schedule))
    whole = cost_table(process, IMAGES, batch_size=4)
    options = {"batch_size": 4, "state": tmp_path / "sweep.safetensors", "save_every": 0.0}
    for progress in Sweep(process, IMAGES, **options):
        if progress.done == 9:  # in the middle of the fifth time
            break
    network.images = 0
    steps = []
    again = cost_table(process, IMAGES, progress=steps.append, **options)
    assert network.images == (12 - 4) * 6
    assert (steps[0].done, steps[-1].done, steps[-1].total) == (9, 24, 24)
    for name, value in whole.sums.items():
        assert torch.equal(value, again.sums[name]), name
    cost_table(process, IMAGES, **options)
    assert network.images == (12 - 4) * 6
    with pytest.raises(ValueError, match=r"belongs to another run: the seed changed from 0 to 1"):
        cost_table(process, IMAGES, seed=1, **options)
    with pytest.raises(ValueError, match="the weights of the network changed"):
        cost_table(process, IMAGES, identity="another", **options)
    with pytest.raises(ValueError, match="the numbers per time changed"):
        cost_table(process, IMAGES, mean_square_noise=torch.ones(13), **options)
    with pytest.raises(ValueError, match="the spectra per time changed from none to npr"):
        cost_table(process, IMAGES, spectra={"npr": torch.ones(1, 4, 4)}, **options)
    for clipping in ({"clip_mean": False}, {"use_clipped_model_output": False}):
        other = ReverseProcess(network, ForwardProcess(schedule), **clipping)
        with pytest.raises(ValueError, match="the (clip mean|use clipped model output) changed from none to False"):
            cost_table(other, IMAGES, **options)


def test_a_state_knows_its_spectra_and_what_its_covariances_hold(tmp_path):
    schedule = Schedule.linear(8, scale=False)
    network = Counted(reference_network)
    process = ReverseProcess(network, ForwardProcess(schedule))
    mixture = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double())[0]

    def sweep(name, covariances, **options):
        before = network.images
        images = IMAGES.reshape(6, 4, 2, 2) if name == "spectra" else IMAGES
        cost_table(process, images, covariances, last_variances=["paper"], state=tmp_path / name, **options)
        return network.images - before

    def objects(number=0.5, held=None):
        own = Analytic(lambda t: number)
        own.held = held
        return {"analytic": own, "residual": IsotropicResidual(torch.full((9,), number)), "range": LearnedRange()}

    assert sweep("objects", objects()) == 48
    assert sweep("objects", objects()) == 0
    for other in (objects(number=0.4), objects(held=1), objects() | {"range": Ocm()}):
        with pytest.raises(ValueError, match="belongs to another run"):
            sweep("objects", other)
    with pytest.raises(ValueError, match="a covariance holds a list, by which a state is not known again"):
        sweep("more objects", objects(held=[1]))
    powers = torch.ones(4, 2, 2)
    assert sweep("spectra", ["npr_correlated"], spectra={"npr": powers}) == 48
    assert sweep("spectra", ["npr_correlated"], spectra={"npr": powers}) == 0
    for spectrum in (2 * powers, Spectrum(lambda t: powers, Basis(mixture))):
        with pytest.raises(ValueError, match="the spectra per time changed"):
            sweep("spectra", ["npr_correlated"], spectra={"npr": spectrum})


def test_a_state_of_other_times_or_damaged_is_refused(tmp_path):
    process = ReverseProcess(reference_network, ForwardProcess(Schedule.linear(100, scale=False)))
    path = tmp_path / "sweep.safetensors"
    options = {"covariances": ["npr"], "state": path}
    times = [1, 2, 3, 50, 98, 99, 100]
    cost_table(process, IMAGES, times=times, **options)
    with pytest.raises(ValueError, match="belongs to another run: the times changed"):
        cost_table(process, IMAGES, times=[60 if t == 50 else t for t in times], **options)
    tensors, metadata = read_tensors(path)
    write_tensors(path, {**tensors, "errors": tensors["errors"] * math.nan}, metadata)
    with pytest.raises(ValueError, match="NaN or infinity in 'errors'; remove it to start anew"):
        cost_table(process, IMAGES, times=times, **options)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"sweep\.safetensors is not a whole .*; remove it to start anew"):
        cost_table(process, IMAGES, times=times, **options)


def test_groups_give_standard_errors_and_pairing_narrows_them():
    """80 images in 8 groups, two covariances that differ little; deterministic by seed."""
    schedule = Schedule.linear(20, scale=False)
    process = ReverseProcess(MIXTURE.network(schedule, error=0.02), ForwardProcess(schedule), data_range=None)
    x_0 = MIXTURE.sample(80, seed=8)
    table = cost_table(process, x_0, ["npr", "sn"], groups=8)
    trajectory = Trajectory.even(schedule, 10)
    score = table.score("npr", trajectory)
    exact = ReverseProcess(process.network, process.forward, "npr", data_range=None)
    per_image = elbo(exact, x_0, trajectory).bits_per_dim()
    assert score.count == 8
    assert score.standard_error == pytest.approx(float(per_image.std()) / math.sqrt(80), rel=0.6)
    assert table.difference("sn", trajectory, "npr").standard_error < score.standard_error / 5


@pytest.mark.parametrize("value", [-1e30, -1.0, 1e30, 1e-30])
@pytest.mark.parametrize("data_range", [(-1, 1), None])
def test_any_head_output_gives_finite_costs_and_clamps_are_counted(value, data_range):
    schedule = Schedule.linear(30, scale=False)

    def network(x, t):
        head = torch.full_like(x, value)
        head[:, :, 0] = 0.3
        return NoisePrediction(0.1 * x, {"npr": head, "sn": head, "range": head})

    process = ReverseProcess(network, ForwardProcess(schedule), data_range=data_range)
    table = cost_table(process, X_0.float())
    for covariance in ("npr", "sn", "range"):
        costs = table.costs(covariance, "own")
        assert np.isfinite(costs[np.triu_indices(31, 1)]).all()
        below, above = table.clamp_rates()[covariance]
        if value < -1:
            assert below == pytest.approx(0.75)
        if value > 1 and (data_range or covariance == "range"):
            assert above == pytest.approx(0.75)


def test_memory_and_state_do_not_grow_with_the_number_of_images():
    schedule = Schedule.linear(10, scale=False)
    process = ReverseProcess(reference_network, ForwardProcess(schedule))
    small, large = (cost_table(process, IMAGES.repeat(n, 1, 1, 1), groups=4) for n in (1, 5))
    assert {k: v.shape for k, v in small.sums.items()} == {k: v.shape for k, v in large.sums.items()}


@pytest.mark.long
def test_a_sweep_over_4000_times_with_every_covariance_keeps_a_tenth_of_4_gb():
    process = ReverseProcess(reference_network, ForwardProcess(Schedule.cosine(4000)))
    names = ["beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr", "range"]
    covariances, grid = PricedCovariances(names, process.forward, {}), TimeGrid(process.forward, range(1, 4001))
    kept = Sums(process, grid, covariances, ["paper", "own"], "exact", 8, 3 * 32 * 32).tensors().values()
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) < 4e8


def test_squared_noise_fails_in_the_table_too():
    """The paper's finding: with an imperfect mean SN needs far more bits than NPR on the same images."""
    schedule = Schedule.linear(100)
    data = oracle.GaussianMixture([0.5, 0.5], [[-0.5, 0.2], [0.7, -0.4]], [1e-3, 1e-3])
    process = ReverseProcess(data.network(schedule, error=0.1), ForwardProcess(schedule), data_range=None)
    table = cost_table(process, data.sample(40), ["sn", "npr"], times=range(4, 101, 4))
    sn, npr = (
        table.group_bits_per_dim(covariance, Trajectory(range(4, 101, 4)), "own") for covariance in ("sn", "npr")
    )
    assert bool((sn > npr + 1).all())  # in each of 8 groups of 5 images


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"covariances": ["nprr"]}, "unknown covariance 'nprr'"),
        ({"covariances": ["npr_full"]}, "'npr_full' correlates pixels"),
        ({"times": [1, 5]}, "ends at 5; append 10"),
        ({"times": [1, 1, 10]}, "increase strictly"),
        ({"shard": (2, 2)}, "shard"),
        ({"last_variances": ["large"]}, "unknown last_variance"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_mistakes_are_named(change, message):
    schedule = Schedule.linear(10, scale=False)
    process = ReverseProcess(MIXTURE.network(schedule), ForwardProcess(schedule), data_range=None)
    with pytest.raises(ValueError, match=message):
        cost_table(process, MIXTURE.sample(3), **change)


def test_what_a_table_does_not_hold_is_named():
    schedule = Schedule.linear(10, scale=False)
    process = ReverseProcess(reference_network, ForwardProcess(schedule))
    table = cost_table(process, X_0, ["npr", "analytic"], times=[1, 5, 10])
    with pytest.raises(ValueError, match="no covariance 'sn'; it has npr, analytic"):
        table.costs("sn")
    with pytest.raises(ValueError, match="pass its numbers per time"):
        table.costs("analytic", "own")
    with pytest.raises(ValueError, match="last_variances that contain 'reference_table'"):
        table.costs("npr", "reference_table")
    with pytest.raises(ValueError, match="time 3 is not among the 3 times"):
        table.score("npr", Trajectory((3, 10)))
    with pytest.raises(ValueError, match="not finished"):
        _ = Sweep(process, X_0).table
    with pytest.raises(ValueError, match="eta = 0"):
        cost_table(ReverseProcess(reference_network, ForwardProcess(schedule, eta=0)), X_0)
