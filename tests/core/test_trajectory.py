from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optcov import Schedule, Trajectory

ACCUMULATED_BY_FLOATS = {"15", "31"}  # recorded with a float step added up, which misses the exact value


def test_even_matches_the_reference_values(golden):
    schedule = Schedule.linear()
    for K, times in golden["trajectories"]["linear_N1000"].items():
        if K not in ACCUMULATED_BY_FLOATS:
            assert list(Trajectory.even(schedule, int(K)).times) == times


@given(st.integers(2, 4000), st.data())
def test_even_is_exact_for_every_length(N, data):
    K = data.draw(st.integers(2, N))
    times = Trajectory.even(Schedule.linear(N, scale=N > 100), K).times
    assert (times[0], times[-1], len(times)) == (1, N, K)
    for i, t in enumerate(times):
        assert abs(t - (1 + Fraction(i * (N - 1), K - 1))) <= Fraction(1, 2)


def test_even_rounds_half_to_even():
    assert Trajectory.even(Schedule.linear(4, scale=False), 3).times == (1, 2, 4)  # 2.5 -> 2
    assert Trajectory.even(Schedule.linear(6, scale=False), 3).times == (1, 4, 6)  # 3.5 -> 4


@given(st.integers(2, 1000))
def test_quadratic_never_repeats_a_time_and_is_denser_near_zero(K):
    times = Trajectory.quadratic(Schedule.linear(), K).times
    assert (times[0], times[-1], len(times)) == (1, 1000, K)
    even = Trajectory.even(Schedule.linear(), K).times
    assert all(q <= e for q, e in zip(times, even, strict=True))


def test_quadratic_follows_its_formula_where_no_time_repeats():
    assert Trajectory.quadratic(Schedule.linear(), 5).times == (1, 63, 251, 563, 1000)  # 1 + 999 (i/4)^2
    assert Trajectory.quadratic(Schedule.linear(9, scale=False), 6).times == (1, 2, 3, 4, 6, 9)  # 1, 1.3, 2.3, 3.9, ...


def test_a_real_time_is_no_place_in_a_table():
    with pytest.raises(ValueError, match="no places in a table"):
        Trajectory([0.5, 1.0]).cost(np.zeros((3, 3)))


def test_continuous_times_are_the_discrete_ones_divided_by_a_thousand():
    for make in (Trajectory.even, Trajectory.quadratic):
        discrete, continuous = make(Schedule.linear(), 10).times, make(Schedule.vp_sde(), 10).times
        assert continuous == tuple(t / 1000 for t in discrete)


def test_descending_visits_every_step_down_to_zero():
    trajectory = Trajectory([2, 5, 9])
    assert list(trajectory.descending()) == [(9, 5), (5, 2), (2, 0)]
    assert len(trajectory) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trajectory.even(Schedule.linear(), 1), r"K = 1 is outside 2..1000"),
        (lambda: Trajectory.even(Schedule.linear(), 1001), r"K = 1001 is outside 2..1000"),
        (lambda: Trajectory.even(Schedule.linear(), 2.5), r"K = 2.5"),
        (lambda: Trajectory.even(Schedule.linear(), float("nan")), r"K = nan"),
        (lambda: Trajectory.even(Schedule.linear(), "5"), r"K = '5'"),
        (lambda: Trajectory.quadratic(Schedule.vp_sde(), 1001), r"K = 1001 is outside 2..1000"),
        (lambda: Trajectory([3, 3]), "3 follows 3"),
        (lambda: Trajectory([5, 2]), "2 follows 5; sort them"),
        (lambda: Trajectory([0, 5]), "0 follows 0"),
        (lambda: Trajectory([]), "at least one time"),
        (lambda: Trajectory([1, float("nan")]), "time nan is not finite"),
    ],
)
def test_bad_times_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "schedule", [Schedule.linear(), Schedule.edm(), Schedule.flow()], ids=["linear", "edm", "flow"]
)
def test_karras_times_start_at_the_noise_that_is_asked_for(schedule):
    times = Trajectory.karras(schedule, 10, first_sigma=0.1).times
    sigma = math.exp(-float(schedule.log_snr(times[0])) / 2)
    assert sigma == pytest.approx(0.1, rel=0.03)  # of a discrete schedule the nearest time
    assert times[-1] == schedule.final_time
    with pytest.raises(ValueError, match="first_sigma = 1000"):
        Trajectory.karras(schedule, 10, first_sigma=1e9)


@pytest.mark.parametrize("largest", [14.6, 50.0, 80.0, 100.0])
def test_karras_times_may_start_and_end_at_the_ends_of_the_schedule(largest):
    schedule = Schedule.edm(0.002, largest)
    times = Trajectory.karras(schedule, 5, first_sigma=0.002, last_sigma=largest).times
    assert times[0] == pytest.approx(0.002, rel=1e-12)
    assert times[-1] == pytest.approx(largest, rel=1e-12)
    schedule.check_times(torch.tensor(times, dtype=torch.float64))
    with pytest.raises(ValueError, match="last_sigma"):
        Trajectory.karras(schedule, 5, last_sigma=1.0001 * largest)
