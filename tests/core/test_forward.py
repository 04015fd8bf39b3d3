from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optcov import ForwardProcess, Schedule

SCHEDULES = {
    "linear": Schedule.linear(),
    "linear 4000": Schedule.linear(4000),
    "cosine": Schedule.cosine(),
    "cosine 4000": Schedule.cosine(4000),
    "vp": Schedule.vp_sde(),
    "ve": Schedule.ve_sde(),
}


@st.composite
def steps(draw):
    """A schedule and two of its times, with both ends likely."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    if schedule.steps is None:
        t = draw(st.one_of(st.just(1.0), st.floats(1e-5, 1.0)))
        s = t * draw(st.one_of(st.just(0.0), st.floats(0, 0.999)))
    else:
        t = draw(st.one_of(st.just(schedule.steps), st.integers(1, schedule.steps)))
        s = draw(st.one_of(st.just(0), st.just(t - 1), st.integers(0, t - 1)))
    return schedule, t, s


def test_bridge_matches_the_reference_values(golden, reference):
    for pair, expected in golden["schedules"]["linear_1000"]["pairs"].items():
        s, t = map(int, pair.split(","))
        ddpm = ForwardProcess(reference.schedule, 1.0).bridge(t, s)
        assert float(ddpm.variance) == pytest.approx(expected["tilde_beta"], rel=1e-10)
        assert float(ddpm.clean_weight) == pytest.approx(expected["ddpm_coeff_x0"], rel=1e-10)
        assert float(ddpm.noisy_weight) == pytest.approx(expected["ddpm_coeff_xt"], rel=1e-10)
        assert float(ddpm.clean_weight**2) == pytest.approx(expected["ddpm_coeff_cov_x0"], rel=1e-10)
        for eta in (0.0, 0.5, 1.0):
            bridge = ForwardProcess(reference.schedule, eta).bridge(t, s)
            name = f"ddim_eta{eta:g}_coeff"
            noise_weight = float(bridge.noisy_weight * reference.schedule.beta_bar(t).sqrt())
            assert noise_weight == pytest.approx(expected[f"{name}_eps"], rel=1e-10)
            assert float(bridge.clean_weight**2) == pytest.approx(expected[f"{name}_cov_x0"], rel=1e-10)


@given(steps(), st.floats(0, 1))
def test_bridge_preserves_the_marginals(step, eta):
    schedule, t, s = step
    bridge = ForwardProcess(schedule, eta).bridge(t, s)
    signal = bridge.clean_weight + bridge.noisy_weight * schedule.alpha_bar(t).sqrt()
    noise = bridge.variance + bridge.noisy_weight.square() * schedule.beta_bar(t)
    assert float(bridge.variance) >= 0
    assert float(signal) == pytest.approx(float(schedule.alpha_bar(s).sqrt()), rel=1e-12)
    assert float(noise) == pytest.approx(float(schedule.beta_bar(s)), rel=1e-12, abs=1e-300)


@given(steps())
def test_bridge_equals_the_papers_form_in_beta_of_t_given_s(step):
    """Propositions 5.1 and 5.2: beta_{t|s} form of variance, mean and the factor before the covariance."""
    schedule, t, s = step
    alpha_ts = torch.exp(schedule.log_alpha_bar(t) - schedule.log_alpha_bar(s))  # alpha_{t|s}
    beta_ts = schedule.beta_bar(t) - alpha_ts * schedule.beta_bar(s)  # beta_{t|s}
    if schedule.steps is not None or isinstance(schedule, type(SCHEDULES["vp"])):
        beta_ts = -torch.expm1(schedule.log_alpha_bar(t) - schedule.log_alpha_bar(s))  # exact for variance-preserving
    beta_t, alpha_t = schedule.beta_bar(t), schedule.alpha_bar(t)
    bridge = ForwardProcess(schedule, eta=1.0).bridge(t, s)
    tolerance = {"rel": 1e-12, "abs": 1e-300} if float(beta_ts / beta_t) > 1e-3 else {"rel": 1e-9, "abs": 1e-300}
    assert float(bridge.variance) == pytest.approx(float(schedule.beta_bar(s) / beta_t * beta_ts), **tolerance)
    factor = bridge.clean_weight.square() * beta_t / alpha_t
    assert float(factor) == pytest.approx(float(beta_ts.square() / (beta_t * alpha_ts)), **tolerance)
    # mean (Eq. 20): with x_0 = (x_t - sqrt(beta_t) eps) / sqrt(alpha_t), the weights of x_t and of eps
    weight_x = bridge.clean_weight / alpha_t.sqrt() + bridge.noisy_weight
    weight_eps = bridge.clean_weight * (beta_t / alpha_t).sqrt()
    assert float(weight_x) == pytest.approx(float(1 / alpha_ts.sqrt()), rel=1e-12)
    assert float(weight_eps) == pytest.approx(float(beta_ts / (alpha_ts * beta_t).sqrt()), **tolerance)


@pytest.mark.parametrize("t", [0.001, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9])
def test_at_real_times_the_papers_form_agrees_to_1e_12(t, share):
    schedule, s = Schedule.vp_sde(), t * share
    alpha_ts = torch.exp(schedule.log_alpha_bar(t) - schedule.log_alpha_bar(s))
    beta_ts = -torch.expm1(schedule.log_alpha_bar(t) - schedule.log_alpha_bar(s))
    bridge = ForwardProcess(schedule).bridge(t, s)
    expected = schedule.beta_bar(s) / schedule.beta_bar(t) * beta_ts
    assert abs(float(bridge.variance - expected)) <= 1e-12 * float(expected)
    factor = bridge.clean_weight.square() * schedule.beta_bar(t) / schedule.alpha_bar(t)
    expected = beta_ts.square() / (schedule.beta_bar(t) * alpha_ts)
    assert abs(float(factor - expected)) <= 1e-12 * float(expected)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_step_to_zero_ends_in_the_clean_image(name):
    schedule = SCHEDULES[name]
    bridge = ForwardProcess(schedule, 0.3).bridge(schedule.final_time, 0)
    assert (float(bridge.clean_weight), float(bridge.noisy_weight), float(bridge.variance)) == (1.0, 0.0, 0.0)


def test_times_may_differ_within_a_batch():
    forward = ForwardProcess(Schedule.linear(), 0.7)
    batch = forward.bridge(torch.tensor([10, 700]), torch.tensor([0, 500]))
    for row, (t, s) in enumerate([(10, 0), (700, 500)]):
        single = forward.bridge(t, s)
        assert float(batch.clean_weight[row]) == float(single.clean_weight)
        assert float(batch.variance[row]) == float(single.variance)


def test_diffuse_scales_signal_and_noise_per_sample():
    forward = ForwardProcess(Schedule.linear())
    x_0, noise = torch.ones(2, 1, 2, 2), torch.full((2, 1, 2, 2), 2.0)
    x_t = forward.diffuse(x_0, torch.tensor([0, 1000]), noise)
    assert x_t.dtype == torch.float32
    assert torch.equal(x_t[0], x_0[0])
    assert float(x_t[1, 0, 0, 0]) == pytest.approx(math.sqrt(4.0358e-05) + 2 * math.sqrt(1 - 4.0358e-05), rel=1e-5)


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan")])
def test_eta_outside_its_interval_is_refused(eta):
    with pytest.raises(ValueError, match=f"eta = {eta} is outside"):
        ForwardProcess(Schedule.linear(), eta)


@pytest.mark.parametrize(
    ("t", "s", "message"),
    [
        (5, 5, "t = 5 and s = 5"),
        (5, 9, "t = 5 and s = 9"),
        (1001, 5, "time 1001 is outside"),
        (10, -1, "time -1 is outside"),
        (2.5, 1, "time 2.5 is not an integer"),
        (torch.tensor([5, 6]), torch.tensor([4, 6]), "swap"),
    ],
)
def test_bad_steps_are_named(t, s, message):
    with pytest.raises(ValueError, match=message):
        ForwardProcess(Schedule.linear()).bridge(t, s)


@pytest.mark.parametrize("eta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(("t", "s"), [(2, 1), (4000, 3999), (4000, 1), (1500, 1499)])
@pytest.mark.parametrize("make", [Schedule.linear, Schedule.cosine])
def test_coefficients_keep_twelve_digits_where_a_plain_formula_cancels(make, t, s, eta):
    """Against 60-digit arithmetic on the same betas, N = 4000."""
    schedule = make(4000)
    with mpmath.workdps(60):
        alpha_bar = [mpmath.mpf(1)]
        for beta in schedule.betas[:t].tolist():
            alpha_bar.append(alpha_bar[-1] * (1 - mpmath.mpf(beta)))
        a_t, a_s = alpha_bar[t], alpha_bar[s]
        lam2 = eta**2 * (1 - a_s) / (1 - a_t) * (1 - a_t / a_s)
        kept = mpmath.sqrt(1 - a_s - lam2)
        kappa, gamma = kept / mpmath.sqrt(1 - a_t), mpmath.sqrt(a_s) - kept * mpmath.sqrt(a_t / (1 - a_t))
        bridge = ForwardProcess(schedule, eta).bridge(t, s)
        for got, exact in [(bridge.variance, lam2), (bridge.noisy_weight, kappa), (bridge.clean_weight, gamma)]:
            assert abs(mpmath.mpf(float(got)) - exact) <= 1e-12 * abs(exact) + mpmath.mpf(10) ** -300


def test_diffuse_refuses_shapes_that_do_not_fit():
    forward = ForwardProcess(Schedule.linear())
    with pytest.raises(ValueError, match=r"floating-point tensors, got torch\.uint8"):
        forward.diffuse(torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([1, 2]), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="t has 3 times and s has 2"):
        forward.bridge(torch.tensor([3, 4, 5]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"noise has shape \(1, 3\), but x_0 has \(2, 3\)"):
        forward.diffuse(torch.zeros(2, 3), 5, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="one number per sample"):
        forward.diffuse(torch.zeros(2, 3), torch.tensor([1, 2, 3]), torch.zeros(2, 3))
