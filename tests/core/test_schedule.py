from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optcov import Schedule


def test_linear_matches_the_reference_values(golden, reference):
    expected = golden["schedules"]["linear_1000"]
    schedule = reference.schedule
    for t, beta in expected["betas"].items():
        assert float(schedule.betas[int(t) - 1]) == pytest.approx(beta, rel=1e-12)
    for t, alpha_bar in expected["cum_alphas"].items():
        assert float(schedule.alpha_bar(int(t))) == pytest.approx(alpha_bar, rel=1e-10)
    assert float(schedule.betas.sum()) == pytest.approx(expected["sum_betas"], rel=1e-12)
    total = schedule.alpha_bar(torch.arange(1, 1001)).sum()
    assert float(total) == pytest.approx(expected["sum_cum_alphas_1..N"], rel=1e-10)


def test_levels_are_float64_and_time_zero_is_data():
    for schedule in (Schedule.linear(), Schedule.cosine(), Schedule.vp_sde(), Schedule.ve_sde()):
        assert schedule.alpha_bar(0).dtype == torch.float64
        assert float(schedule.alpha_bar(0)) == 1.0
        assert float(schedule.beta_bar(0)) == 0.0
        assert float(schedule.log_snr(0)) == math.inf


def test_times_may_be_numbers_or_batches():
    schedule = Schedule.linear()
    batch = schedule.beta_bar(torch.tensor([1, 500, 1000]))
    assert batch.shape == (3,)
    assert [float(schedule.beta_bar(t)) for t in (1, 500, 1000)] == batch.tolist()
    assert float(schedule.beta_bar(500.0)) == float(schedule.beta_bar(500))


def test_linear_scales_its_betas_to_the_number_of_steps():
    assert float(Schedule.linear(100).betas[-1]) == pytest.approx(0.2)
    assert float(Schedule.linear(100, scale=False).betas[-1]) == pytest.approx(0.02)


def test_cosine_follows_its_definition_and_caps_beta():
    schedule = Schedule.cosine(4000)

    def signal(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    assert float(schedule.alpha_bar(2000)) == pytest.approx(signal(0.5) / signal(0.0), rel=1e-10)
    assert float(schedule.betas.max()) == 0.999


def test_vp_sde_restricted_to_a_grid_is_the_discrete_schedule_of_its_betas():
    schedule, N = Schedule.vp_sde(), 1000
    discrete = schedule.on_grid(N)
    assert discrete.steps == N
    for n in (1, 2, 500, 1000):
        assert float(discrete.log_snr(n)) == pytest.approx(float(schedule.log_snr(n / N)), rel=1e-12)


def test_ve_sde_keeps_the_signal():
    schedule = Schedule.ve_sde(0.01, 50.0)
    assert float(schedule.alpha_bar(0.7)) == 1.0
    assert float(schedule.beta_bar(1.0)) == pytest.approx(50.0**2 - 0.01**2, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_from_diffusers_recomputes_its_schedule_in_float64(kind):
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(beta_schedule=kind, beta_start=0.00085, beta_end=0.012)
    schedule = Schedule.from_diffusers(scheduler)
    ours = schedule.alpha_bar(torch.arange(1, 1001))
    theirs = scheduler.alphas_cumprod.double()
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-9)
    if kind == "squaredcos_cap_v2":
        assert torch.equal(ours, Schedule.cosine().alpha_bar(torch.arange(1, 1001)))
    else:
        root = 0.5 if kind == "scaled_linear" else 1.0
        betas = np.linspace(0.00085**root, 0.012**root, 1000) ** (1 / root)
        np.testing.assert_allclose(ours.numpy(), np.cumprod(1 - betas), rtol=1e-12)  # not rounded to float32


def test_from_diffusers_takes_trained_betas_and_other_schedules_as_they_are():
    from diffusers import DDPMScheduler

    betas = np.linspace(0.01, 0.02, 10)
    trained = Schedule.from_diffusers(DDPMScheduler(num_train_timesteps=10, trained_betas=betas.tolist()))
    torch.testing.assert_close(trained.betas, torch.from_numpy(betas))
    sigmoid = DDPMScheduler(num_train_timesteps=10, beta_schedule="sigmoid")
    torch.testing.assert_close(Schedule.from_diffusers(sigmoid).betas, sigmoid.betas.double())


def test_from_diffusers_takes_flow_matching_whatever_its_shift():
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

    flow = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    for scheduler in (FlowMatchEulerDiscreteScheduler(shift=3.0), flow):
        assert Schedule.from_diffusers(scheduler).spec() == {"kind": "flow"}


def test_from_diffusers_takes_the_sigmas_of_edm():
    from diffusers import EDMEulerScheduler

    schedule = Schedule.from_diffusers(EDMEulerScheduler(sigma_min=0.01, sigma_max=40.0))
    assert schedule.spec() == {"kind": "edm", "sigma_min": 0.01, "sigma_max": 40.0}


def test_from_diffusers_ends_without_signal_where_the_scheduler_does():
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction")
    schedule = Schedule.from_diffusers(scheduler)
    ours = schedule.alpha_bar(torch.arange(1, 1001))
    torch.testing.assert_close(ours[:-1], scheduler.alphas_cumprod.double()[:-1], rtol=2e-3, atol=1e-7)
    assert float(ours[-1]) == 0
    assert float(schedule.beta_bar(1000)) == 1
    assert float(schedule.time_at(schedule.log_snr(1000))) == 1000
    assert float(schedule.time_at(schedule.log_snr(999))) == pytest.approx(999)


@pytest.mark.parametrize("zero", [False, True])
def test_from_diffusers_shifts_the_snr_where_the_scheduler_does(zero):
    from diffusers import CogVideoXDDIMScheduler

    options = {"snr_shift_scale": 3.0, "rescale_betas_zero_snr": zero, "prediction_type": "v_prediction"}
    scheduler = CogVideoXDDIMScheduler(**options)
    ours = Schedule.from_diffusers(scheduler).alpha_bar(torch.arange(1, 1001))
    torch.testing.assert_close(ours, scheduler.alphas_cumprod.double(), rtol=0, atol=1e-5)


def test_from_diffusers_refuses_betas_that_something_else_changed():
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()
    scheduler.alphas_cumprod = scheduler.alphas_cumprod**2
    with pytest.raises(ValueError, match="DDPMScheduler has other alphas_cumprod than its betas give; build"):
        Schedule.from_diffusers(scheduler)


def test_from_diffusers_refuses_what_has_no_noise_schedule():
    from diffusers import DDPMScheduler, VQDiffusionScheduler

    with pytest.raises(ValueError, match="VQDiffusionScheduler has no noise schedule"):
        Schedule.from_diffusers(VQDiffusionScheduler(10))
    with pytest.raises(ValueError, match="rescale_betas_zero_snr=False"):
        Schedule.from_diffusers(DDPMScheduler(rescale_betas_zero_snr=True))


def test_a_schedule_does_not_follow_later_changes_of_the_callers_betas():
    betas = np.array([0.1, 0.2])
    schedule = Schedule.from_betas(betas)
    betas[0] = 0.9
    assert schedule.betas.tolist() == [0.1, 0.2]


def test_nobody_changes_the_betas_of_a_schedule_by_those_it_gave():
    schedule = Schedule.linear(24)
    before = schedule.betas.clone()
    schedule.betas.mul_(0.5)
    assert torch.equal(schedule.betas, before)


@given(st.lists(st.floats(1e-9, 0.9), min_size=1, max_size=30))
def test_alpha_bar_decreases_strictly_for_any_betas(betas):
    schedule = Schedule.from_betas(betas)
    levels = schedule.alpha_bar(torch.arange(len(betas) + 1))
    assert bool((levels.diff() < 0).all())
    assert bool((schedule.beta_bar(torch.arange(len(betas) + 1)).diff() >= 0).all())


@pytest.mark.parametrize("steps", [1, 2, 10, 1000, 4000])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_signal_and_noise_power_sum_to_one(kind, steps):
    schedule = Schedule.cosine(steps) if kind == "cosine" else Schedule.linear(steps, scale=steps >= 100)
    times = torch.arange(steps + 1)
    total = schedule.alpha_bar(times) + schedule.beta_bar(times)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-15)
    assert bool((schedule.alpha_bar(times).diff() < 0).all())


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        ([0.1, 0.0], r"betas\[1\] = 0.0 is outside \(0, 1\)"),
        ([1.0, 0.1], r"betas\[0\] = 1.0 is outside"),
        ([0.1, 1.0, 0.1], r"betas\[1\] = 1.0 is outside"),
        ([1.0], r"betas\[0\] = 1.0 is outside"),
        ([float("nan")], r"betas\[0\] = nan"),
        ([-0.1], r"betas\[0\] = -0.1"),
        ([], "non-empty"),
        ([[0.1]], "one-dimensional"),
        ([0.9] * 1000, "the signal vanishes"),
        ([0.1, 1e-20], r"betas\[1\] = 1e-20 is too small"),
    ],
)
def test_bad_betas_are_named(betas, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_betas(betas)


@pytest.mark.parametrize(
    ("schedule", "t", "message"),
    [
        (Schedule.linear(), 1001, "time 1001 is outside this schedule; use times from 0 to 1000"),
        (Schedule.linear(), -1, "time -1 is outside"),
        (Schedule.linear(), 0.5, "time 0.5 is not an integer"),
        (Schedule.linear(), float("nan"), "time nan is not an integer"),
        (Schedule.linear(), torch.tensor([3, 2000]), "time 2000 is outside"),
        (Schedule.linear(), torch.zeros(2, 2), "number or a"),
        (Schedule.vp_sde(), 1.5, "time 1.5 is outside this schedule; use real times from 0 to 1"),
        (Schedule.vp_sde(), 500, "divide a step number"),
        (Schedule.vp_sde(), float("nan"), "time nan is outside"),
    ],
)
def test_bad_times_are_named(schedule, t, message):
    with pytest.raises(ValueError, match=message):
        schedule.alpha_bar(t)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.linear(0), "steps = 0"),
        (lambda: Schedule.cosine(2.5), "steps = 2.5"),
        (lambda: Schedule.linear(float("inf")), "steps = inf"),
        (lambda: Schedule.linear("10"), "steps = '10'"),
        (lambda: Schedule.vp_sde(0.0, 20.0), "beta_min=0.0"),
        (lambda: Schedule.vp_sde(5.0, 1.0), "beta_min <= beta_max"),
        (lambda: Schedule.vp_sde(0.1, 1e6), "the signal vanishes"),
        (lambda: Schedule.ve_sde(1.0, 0.5), "sigma_min < sigma_max"),
    ],
)
def test_bad_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_asked_for_again_is_not_the_one_somebody_changed():
    schedule = Schedule.linear()
    schedule.alpha_bar(500).zero_()
    assert float(schedule.alpha_bar(500)) == pytest.approx(0.078587, rel=1e-5)
    assert torch.equal(schedule.alpha_bar(torch.tensor([500])), schedule.alpha_bar(500)[None])
