"""The dynamic program for optimal trajectories: exact, for every length at once, on any table of costs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optcov import Schedule, Trajectory

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "steps.json").read_text())


def test_synthetic_paths_of_the_authors_are_found():
    golden = GOLDEN["dp_vb_synthetic"]
    s, t = np.meshgrid(np.arange(51), np.arange(51), indexing="ij")
    costs = (t - s) ** 2 / (1 + 0.01 * s * t) + 5 / (s + 1)
    best = Trajectory.optimal_all(costs, max(map(int, golden["K"])))
    for K, expected in golden["K"].items():
        assert [0, *best[int(K)].times] == expected["path"]
        assert best[int(K)].cost(costs) == pytest.approx(expected["cost"], rel=1e-12)
        assert Trajectory.optimal(costs, int(K)) == best[int(K)]


def test_paths_of_the_authors_table_are_found():
    run = GOLDEN["small_N_pipeline"]["runs"]["linear_40 DDPM_small clip=True"]
    costs = np.full((41, 41), np.inf)
    for s, row in enumerate(run["F_rows"]):
        costs[s, s + 1 :] = row
    best = Trajectory.optimal_all(costs, 40)
    for K, expected in run["paths"].items():
        assert [0, *best[int(K)].times] == expected["path"]
        assert best[int(K)].cost(costs) == pytest.approx(expected["cost"], rel=1e-12)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 8), st.data())
def test_no_other_trajectory_is_cheaper(N, data):
    """Against all trajectories there are; a few equal, negative and forbidden costs among them."""
    entries = st.sampled_from([0.0, 1.0, 1.0, 2.5, -3.0, np.inf])
    costs = np.array(data.draw(st.lists(entries, min_size=(N + 1) ** 2, max_size=(N + 1) ** 2))).reshape(N + 1, N + 1)
    totals = {
        K: min(Trajectory([*middle, N]).cost(costs) for middle in itertools.combinations(range(1, N), K - 1))
        for K in range(1, N + 1)
    }
    possible = {K: cost for K, cost in totals.items() if np.isfinite(cost)}
    if not possible:
        with pytest.raises(ValueError, match="finite cost"):
            Trajectory.optimal_all(costs, N)
        return
    found = Trajectory.optimal_all(costs, N)
    assert {K: path.cost(costs) for K, path in found.items()} == pytest.approx(possible)
    assert all(len(path) == K and path.times[-1] == N for K, path in found.items())


def test_more_than_one_block_of_rows_gives_the_same_as_plain_rows():
    N, K = 700, 40
    costs = np.random.default_rng(0).random((N + 1, N + 1)) * np.abs(
        np.subtract.outer(np.arange(N + 1), np.arange(N + 1))
    )
    upper = np.where(np.triu(np.ones_like(costs), 1) > 0, costs, np.inf)
    total = upper[0].copy()
    for _ in range(K - 1):
        total = (total[:, None] + upper).min(0)
    assert Trajectory.optimal(costs, K).cost(costs) == pytest.approx(total[N], rel=1e-12)


def test_a_forbidden_length_is_refused_and_left_out():
    costs = np.full((5, 5), np.inf)
    costs[np.arange(4), np.arange(1, 5)] = 1.0  # single steps only
    assert list(Trajectory.optimal_all(costs, 4)) == [4]
    with pytest.raises(ValueError, match=r"no trajectory of up to 2 times reaches the end at a finite cost"):
        Trajectory.optimal(costs, 2)
    costs[0, 4] = 9.0
    with pytest.raises(ValueError, match=r"no trajectory of 2 times has a finite cost"):
        Trajectory.optimal(costs, 2)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_cost_that_is_no_cost_is_named(bad):
    costs = np.ones((5, 5))
    costs[3, 1] = bad  # not a step
    Trajectory.optimal(costs, 2)
    costs[1, 3] = bad
    with pytest.raises(ValueError, match=r"costs\[1, 3\] is"):
        Trajectory.optimal(costs, 2)


@pytest.mark.parametrize(("shape", "K"), [((4, 5), 2), ((4,), 2), ((1, 1), 1), ((5, 5), 5), ((5, 5), 0)])
def test_tables_and_lengths_that_do_not_fit_are_refused(shape, K):
    with pytest.raises(ValueError, match=r"costs must be|K = "):
        Trajectory.optimal(np.ones(shape), K)


def test_equal_costs_are_decided_the_same_way_each_time():
    costs = np.ones((8, 8))
    assert Trajectory.optimal(costs, 3).times == (1, 2, 7)
    assert Trajectory.optimal(costs, 3) == Trajectory.optimal_all(costs, 6)[3]


def test_times_are_exported_as_diffusers_counts_them():
    assert Trajectory([1, 500, 1000]).diffusers_timesteps(Schedule.linear()) == [999, 499, 0]
    assert Trajectory([0.001, 0.5, 1.0]).diffusers_timesteps(Schedule.vp_sde()) == [999, 499, 0]
    assert Trajectory([0.08, 40.0, 80.0]).diffusers_timesteps(Schedule.edm()) == [999, 499, 0]
    with pytest.raises(ValueError, match="time 0.00025 is not one of 1000 even times"):
        Trajectory([0.00025, 1.0]).diffusers_timesteps(Schedule.vp_sde())
