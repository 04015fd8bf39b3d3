from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optcov import METHODS, ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, elbo, oracle
from optcov.covariances import Analytic, Covariance, OneNumber, Residual, Row, clamped_in_words
from optcov.gaussian import Diagonal
from optcov.likelihood import cost_table
from optcov.prediction import Prediction

COVARIANCES = ["beta_tilde", "beta", "analytic", "npr_isotropic", "sn", "npr", "range"]
ALL_COVARIANCES = [*COVARIANCES, "sn_full", "npr_full"]


def make_process(reference, name, clip, **settings):
    eta, covariance = reference.covariances[name]
    return ReverseProcess(
        reference.network,
        ForwardProcess(reference.schedule, eta),
        covariance,
        data_range=(-1, 1) if clip else None,
        mean_square_noise=reference.mean_square_noise,
        **settings,
    )


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *["DDPM_small", "DDPM_big", "DDPM_analytic", "DDPM_NPR", "DDPM_SN", "DDPM_iddpm"],
        *["DDIM_eta0_small", "DDIM_eta0_analytic", "DDIM_eta0_NPR", "DDIM_eta0_SN", "DDIM_eta0.5_NPR"],
    ],
)
def test_step_matches_the_reference_values(golden, reference, name, clip):
    process = make_process(reference, name, clip)
    for pair, expected in golden["step"]["linear_1000"][name][f"clip={clip}"].items():
        s, t = map(int, pair.split(","))
        step = process.step(reference.x_t, t, s)
        assert reference.differs(step.mean, expected["mean"]) <= 1e-10
        assert reference.differs(step.variance, expected["sigma2"]) <= 1e-10


@pytest.mark.parametrize("clip", [False, True])
def test_posterior_matches_the_reference_values(golden, reference, clip):
    names = {"cov_x0_analytic": "DDPM_analytic", "cov_x0_NPR": "DDPM_NPR", "cov_x0_SN": "DDPM_SN"}
    for t, expected in golden["predict"]["linear_1000"][f"clip={clip}"].items():
        for key, name in names.items():
            posterior = make_process(reference, name, clip).posterior(reference.x_t, int(t))
            assert reference.differs(posterior.mean, expected["x0_hat"]) <= 1e-10
            assert reference.differs(posterior.variance, expected[key]) <= 1e-10
        prediction = reference.network(reference.x_t, int(t))
        assert reference.differs(prediction.noise, expected["eps_hat"]) <= 1e-10


def test_beta_and_beta_tilde_are_the_papers_even_for_a_narrow_data_range(reference):
    for covariance, key in [("beta", 0.1263076378529364), ("beta_tilde", 9.993087603836037e-05)]:
        forward = ForwardProcess(reference.schedule)
        process = ReverseProcess(reference.network, forward, covariance, data_range=(0, 0.01))
        assert float(process.step(reference.x_t, 112, 1).variance) == pytest.approx(key, rel=1e-10)


def test_clipped_model_output_matters_only_where_x_0_is_clipped(reference):
    raw = make_process(reference, "DDIM_eta0_NPR", True, use_clipped_model_output=False)
    derived = make_process(reference, "DDIM_eta0_NPR", True, use_clipped_model_output=True)
    assert make_process(reference, "DDIM_eta0_NPR", True).use_clipped_model_output is False
    assert make_process(reference, "DDPM_NPR", True).use_clipped_model_output is True
    inside = raw.posterior(reference.x_t, 1000).mean.abs() < 1
    difference = (raw.step(reference.x_t, 1000, 889).mean - derived.step(reference.x_t, 1000, 889).mean).abs()
    assert float(difference[inside].max()) < 1e-12
    assert float(difference[~inside].min()) > 1e-3


def test_variance_is_bounded_by_the_data_range_and_clamps_are_counted():
    def network(x_t, t):
        heads = {"npr": torch.full_like(x_t, 5.0), "sn": torch.full_like(x_t, -5.0)}
        return NoisePrediction(torch.zeros_like(x_t), heads)

    forward, x_t = ForwardProcess(Schedule.linear()), torch.zeros(2, 3)
    wide = ReverseProcess(network, forward, "npr", data_range=(-3, 1))
    assert wide.posterior(x_t, 900).variance.unique().tolist() == [4.0]
    assert (wide.bounds.below, wide.bounds.above, wide.bounds.total) == (0, 6, 6)
    negative = ReverseProcess(network, forward, "sn", data_range=None)
    assert negative.posterior(x_t, 900).variance.unique().tolist() == [0.0]
    assert (negative.bounds.below, negative.bounds.above) == (6, 0)
    assert "below=6" in repr(negative.bounds)
    unbounded = ReverseProcess(network, forward, "npr", data_range=None)
    assert float(unbounded.posterior(x_t, 900).variance.min()) > 100


def test_times_may_differ_within_a_batch(reference):
    for covariance in COVARIANCES:
        process = ReverseProcess(
            lambda x, t: reference.network(x, t.double().reshape(-1, 1, 1, 1) if torch.is_tensor(t) else t),
            ForwardProcess(reference.schedule),
            covariance,
            mean_square_noise=reference.mean_square_noise,
            mean_square_residual=reference.mean_square_noise,
        )
        batch = process.step(reference.x_t, torch.tensor([112, 1000]), torch.tensor([1, 889]))
        for row, (t, s) in enumerate([(112, 1), (1000, 889)]):
            single = process.step(reference.x_t[row : row + 1], t, s)
            torch.testing.assert_close(batch.mean[row : row + 1], single.mean, rtol=1e-13, atol=1e-13)
            both = [
                v.expand(2, 1, 4, 4)[row] if v.ndim == 0 or len(v) == 2 else v[0].expand(1, 4, 4)
                for v in (batch.variance, single.variance)
            ]
            torch.testing.assert_close(*both, rtol=1e-12, atol=0)


def test_numbers_per_time_may_be_a_function_and_work_at_real_times():
    def network(x_t, t):
        return NoisePrediction(torch.zeros_like(x_t))

    x_t, schedule = torch.zeros(2, 1, dtype=torch.float64), Schedule.vp_sde()
    process = ReverseProcess(network, ForwardProcess(schedule), "analytic", None, mean_square_noise=lambda t: 1 - t)
    expected = schedule.beta_bar(0.3) / schedule.alpha_bar(0.3) * 0.3
    assert float(process.posterior(x_t, 0.3).variance) == pytest.approx(float(expected), rel=1e-12)


@given(
    st.sampled_from(ALL_COVARIANCES),
    st.sampled_from([10, 1000, 4000]),
    st.booleans(),
    st.sampled_from([None, (-1, 1)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(-1e4, 1e4),
    st.sampled_from([1.0, 0.5, 0.0]),
    st.data(),
)
def test_no_nan_for_any_step_in_low_precision(covariance, N, cosine, data_range, dtype, scale, eta, data):
    eta = 1.0 if covariance in ("beta", "range") else eta
    schedule = Schedule.cosine(N) if cosine else Schedule.linear(N, scale=N > 100)
    t = data.draw(st.one_of(st.just(N), st.integers(1, N)))
    s = data.draw(st.one_of(st.just(0), st.just(t - 1), st.integers(0, t - 1)))

    def network(x_t, t):
        noise = torch.linspace(-3, 3, 8).reshape(2, 4).to(dtype)
        full = (scale * noise).unsqueeze(-1) * noise.unsqueeze(-2)  # of either sign
        heads = {"sn": scale * noise, "npr": scale * noise, "range": scale * noise, "sn_full": full, "npr_full": full}
        return NoisePrediction(noise, heads)

    process = ReverseProcess(
        network,
        ForwardProcess(schedule, eta),
        covariance,
        data_range,
        mean_square_noise=torch.full((N + 1,), 0.9),
        mean_square_residual=torch.full((N + 1,), 0.1),
    )
    step = process.step(torch.linspace(2, -2, 8).reshape(2, 4).to(dtype), t, s)
    assert bool(step.mean.isfinite().all())
    assert bool(step.variance.isfinite().all())
    assert bool((step.variance >= 0).all())
    assert step.mean.dtype == torch.float32
    assert bool(step.sample(torch.ones(2, 4)).isfinite().all())


def test_an_estimator_object_may_stand_for_a_name(reference):
    by_name = make_process(reference, "DDPM_NPR", True).step(reference.x_t, 112, 1)
    process = ReverseProcess(reference.network, ForwardProcess(reference.schedule), Residual())
    assert torch.equal(process.step(reference.x_t, 112, 1).variance, by_name.variance)


def test_numbers_beside_a_covariance_that_has_its_own_are_refused(reference):
    forward, numbers = ForwardProcess(reference.schedule), torch.full((1001,), 0.5)
    with pytest.raises(ValueError, match="mean_square_noise comes beside Analytic, an object that has its own"):
        ReverseProcess(reference.network, forward, Analytic(numbers), mean_square_noise=0.9 * numbers)
    ReverseProcess(reference.network, forward, Residual(), mean_square_noise=numbers)  # which looks at none


def test_full_covariances_give_a_matrix_per_sample():
    schedule = Schedule.linear()
    data = oracle.GaussianMixture([1.0], [[0.0, 0.0]], [[[1.0, 0.9], [0.9, 1.0]]])
    process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "npr_full", None)
    step = process.step(torch.zeros(3, 2, dtype=torch.float64), 500, 400)
    assert step.variance.shape == (3, 2)
    assert step.sample(torch.ones(3, 2, dtype=torch.float64)).shape == (3, 2)


@pytest.mark.parametrize("covariance", ["range", "beta"])
def test_covariances_of_the_ddpm_process_refuse_another_eta(reference, covariance):
    with pytest.raises(ValueError, match=rf'covariance "{covariance}" .* eta = 0.5; use eta=1'):
        ReverseProcess(reference.network, ForwardProcess(reference.schedule, 0.5), covariance)


def test_learned_range_has_no_posterior(reference):
    process = ReverseProcess(reference.network, ForwardProcess(reference.schedule), "range")
    with pytest.raises(ValueError, match='use "npr" or "sn" for posterior'):
        process.posterior(reference.x_t, 5)


def test_a_nan_names_the_time_and_the_samples(reference):
    def network(x_t, t):
        noise = torch.zeros_like(x_t)
        noise[1] = float("nan")
        return NoisePrediction(noise)

    process = ReverseProcess(network, ForwardProcess(reference.schedule), "beta")
    with pytest.raises(ValueError, match=r"NaN or infinity at time 7 for samples \[1\]; check"):
        process.step(reference.x_t, 7, 3)


def test_bad_compositions_are_named(reference):
    forward, network = ForwardProcess(reference.schedule), reference.network
    cases = [
        ({"covariance": "optimal"}, r"unknown covariance 'optimal'; choose one of .*analytic, beta"),
        ({"covariance": "analytic"}, "'analytic' needs one number per time: pass mean_square_noise="),
        ({"covariance": "npr_isotropic"}, "'npr_isotropic' needs .* mean_square_residual="),
        (
            {"covariance": "analytic", "mean_square_noise": torch.zeros(1000)},
            r"shape \(1000,\), .* pass 1001 numbers",
        ),
        (
            {"covariance": "analytic", "mean_square_noise": torch.full((1001,), torch.nan)},
            "not finite at time 1",
        ),
        ({"data_range": (1, -1)}, r"data_range = \(1, -1\) is not"),
        ({"data_range": (0, float("nan"))}, "data_range"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            ReverseProcess(network, forward, **settings)
    with pytest.raises(ValueError, match="this schedule has real times; pass a callable"):
        ReverseProcess(network, ForwardProcess(Schedule.vp_sde()), "analytic", mean_square_noise=torch.zeros(1001))


def test_bad_calls_are_named_before_the_network_runs(reference):
    def network(x_t, t):
        raise AssertionError("must not run")

    process = ReverseProcess(network, ForwardProcess(reference.schedule), "beta")
    for x_t, t, s, message in [
        (reference.x_t, 3, 7, "t = 3 and s = 7"),
        ([[0.0]], 7, 3, "must be a torch tensor, got list"),
        (reference.x_t, 2000, 7, "time 2000 is outside"),
        (torch.zeros(2, 3, dtype=torch.long), 7, 3, "floating-point tensor"),
        (torch.zeros(3), 7, 3, r"got torch.float32 of shape \(3,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            process.step(x_t, t, s)


def test_posterior_checks_its_time_before_the_network_runs(reference):
    def network(x_t, t):
        raise AssertionError("must not run")

    process = ReverseProcess(network, ForwardProcess(reference.schedule), "beta")
    with pytest.raises(ValueError, match="time 1001 is outside"):
        process.posterior(reference.x_t, 1001)


def test_nothing_is_half_built_from_bad_parts(reference):
    forward = ForwardProcess(reference.schedule)
    for make, message in [
        (lambda: ForwardProcess(None), "schedule = None is not a Schedule"),
        (lambda: ReverseProcess(None, forward), "network = None is not callable"),
        (lambda: ReverseProcess(reference.network, forward, data_range=(1, 2, 3)), "data_range"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_numbers_per_time_may_be_a_numpy_array_and_must_be_finite(reference):
    forward = ForwardProcess(reference.schedule)
    numbers = reference.mean_square_noise.numpy()
    by_array = ReverseProcess(reference.network, forward, "analytic", mean_square_noise=numbers)
    by_tensor = make_process(reference, "DDPM_analytic", True)
    assert float(by_array.step(reference.x_t, 112, 1).variance) == float(by_tensor.step(reference.x_t, 112, 1).variance)
    broken = ReverseProcess(reference.network, forward, "analytic", mean_square_noise=lambda t: float("nan"))
    with pytest.raises(ValueError, match="the number per time at t = 112 is not finite"):
        broken.step(reference.x_t, 112, 1)


def test_half_precision_points_are_lifted_before_anything_is_computed(reference):
    process = make_process(reference, "DDPM_NPR", True)
    half = reference.x_t.bfloat16()
    answer, levels = reference.network(half.float(), 500), reference.schedule.levels(500)
    exact = process.step_from(Prediction.of(answer, half.float(), 500, *levels), 400)
    lifted = process.step_from(Prediction.of(answer, half, 500, *levels), 400)
    assert lifted.mean.dtype == torch.float32
    torch.testing.assert_close(lifted.mean, exact.mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "schedule", [Schedule.linear(40), Schedule.cosine(), Schedule.cosine(4000), Schedule.vp_sde().on_grid()]
)
@pytest.mark.parametrize("eta", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("clip", [False, True])
def test_steps_on_other_schedules_follow_the_papers_own_form(reference, schedule, eta, clip):
    """Eqs. 2, 6, 10, 16 as printed, with alpha_bar as a plain product of 1 - beta."""
    N, x_t = schedule.steps, reference.x_t
    alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod(1 - schedule.betas, 0)])
    for t, s in [(N, N - 1), (N, N // 2), (N // 2, 1), (2, 1), (1, 0)]:
        prediction = reference.network(x_t, t)
        beta_bar_t, beta_bar_s = 1 - alpha_bar[t], 1 - alpha_bar[s]
        tilde = beta_bar_s / beta_bar_t * (1 - alpha_bar[t] / alpha_bar[s])
        lam2 = eta**2 * tilde
        kappa_eps = (beta_bar_s - lam2).clamp(min=0).sqrt()
        gamma = alpha_bar[s].sqrt() - kappa_eps * (alpha_bar[t] / beta_bar_t).sqrt()
        x_0 = (x_t - beta_bar_t.sqrt() * prediction.noise) / alpha_bar[t].sqrt()
        x_0 = x_0.clamp(-1, 1) if clip else x_0
        eps = (x_t - alpha_bar[t].sqrt() * x_0) / beta_bar_t.sqrt() if eta == 1 else prediction.noise
        k = beta_bar_t / alpha_bar[t]
        moments = {"npr": k * prediction.head("npr"), "sn": k * (prediction.head("sn") - prediction.noise**2)}
        for covariance, v in moments.items():
            process = ReverseProcess(
                reference.network, ForwardProcess(schedule, eta), covariance, (-1, 1) if clip else None
            )
            step = process.step(x_t, t, s)
            v = v.clamp(0, 1) if clip else v.clamp(min=0)
            torch.testing.assert_close(step.mean, alpha_bar[s].sqrt() * x_0 + kappa_eps * eps, rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(step.variance, lam2 + gamma**2 * v, rtol=1e-6, atol=1e-12)


def test_a_network_with_the_wrong_output_is_named(reference):
    bare_tensor = ReverseProcess(lambda x, t: x, ForwardProcess(reference.schedule), "beta")
    with pytest.raises(ValueError, match="the network returned a Tensor; a network returns NoisePrediction"):
        bare_tensor.step(reference.x_t, 7, 3)
    process = ReverseProcess(lambda x, t: NoisePrediction(x[:, :, :2]), ForwardProcess(reference.schedule), "beta")
    with pytest.raises(ValueError, match=r"noise of shape \(2, 1, 2, 4\) for x_t of shape \(2, 1, 4, 4\)"):
        process.step(reference.x_t, 7, 3)
    for covariance in ("sn", "npr", "range", "sn_full"):
        bare = ReverseProcess(lambda x, t: NoisePrediction(x), ForwardProcess(reference.schedule), covariance)
        with pytest.raises(ValueError, match=f"needs the head '{covariance}'"):
            bare.step(reference.x_t, 7, 3)
    assert set(Covariance.registry) >= {"sn", "npr", "range", "beta", "beta_tilde"}


def test_negative_variances_of_few_probes_are_answered_by_more_of_them() -> None:
    assert clamped_in_words("ocm", 0.457, 0).endswith("which adds much noise: prefer more probes, or NPR")


def test_what_was_clamped_is_told_in_the_terms_of_the_covariance() -> None:
    said = clamped_in_words("range", 0.25, 0.5)
    assert said.startswith("25% of the learned places lay below the range, 50%")


@pytest.mark.parametrize(
    ("below", "above", "said"),
    [
        (0.02, 0.0, "2% of the variances were negative and were set to 0: harmless below 10%"),
        (0.15, 0.0, "15% of the variances were negative and were set to 0, which adds some noise: compare with"),
        (0.25, 0.1, "25% of the variances were negative and were set to 0, which adds much noise: prefer"),
        (0.0, 0.318, "31.8% of the variances were larger than data in this range can have and were lowered to that"),
        (0.0, 0.318, "usual at the noisiest times"),
        (0.0, 0.745, "were lowered to that: so many are a sign of a network that was hardly trained"),
    ],
)
def test_what_was_clamped_is_told_with_whether_it_is_bad(below: float, above: float, said: str) -> None:
    told = clamped_in_words("sn" if below else "npr", below, above)
    assert said in told
    assert ("negative" in told) == bool(below)
    assert ("larger than" in told) == bool(above)


def test_the_mean_may_stay_unclipped_while_variances_are_bounded():
    schedule = Schedule.linear()
    network = lambda x, t: NoisePrediction(torch.zeros_like(x), {"npr": torch.full_like(x, 9.0)})  # noqa: E731
    x_t = torch.full((2, 1, 2, 2), 3.0)
    process = ReverseProcess(network, ForwardProcess(schedule), "npr", clip_mean=False)
    raw = ReverseProcess(network, ForwardProcess(schedule), "npr", data_range=None)
    assert torch.equal(process.step(x_t, 500, 400).mean, raw.step(x_t, 500, 400).mean)
    assert float(process.posterior(x_t, 500).variance.max()) == 1.0
    assert float(process.step(x_t, 500, 0).mean.max()) == 1.0  # the last step shows what lies in the range
    mixed = process.step(x_t, torch.tensor([500, 500]), torch.tensor([0, 400])).mean
    assert float(mixed[0].max()) == 1.0
    torch.testing.assert_close(mixed[1], raw.step(x_t, 500, 400).mean[1])


def test_nobody_can_change_a_later_step(reference):
    forward = ForwardProcess(Schedule.linear())
    before = forward.bridge(500, 400)
    for name in ("clean_weight", "noisy_weight", "variance"):
        getattr(forward.bridge(500, 400), name).mul_(3)
        assert torch.equal(getattr(forward.bridge(500, 400), name), getattr(before, name))
    for level in forward.levels(500):
        level.mul_(3)
    assert float(forward.levels(500)[0]) == pytest.approx(float(forward.schedule.alpha_bar(500).sqrt()))
    for name in ("alpha_bar", "beta_bar", "log_alpha_bar", "log_beta_bar", "log_snr"):
        known = getattr(forward.schedule, name)(500).clone()
        getattr(forward.schedule, name)(500).mul_(3)
        assert torch.equal(getattr(forward.schedule, name)(500), known), name
    numbers = torch.full((1001,), 0.5, dtype=torch.float64)
    process = ReverseProcess(lambda x, t: NoisePrediction(x), forward, "analytic", None, mean_square_noise=numbers)
    before_numbers = process.step(torch.zeros(1, 2), 500, 400).variance
    numbers.zero_()
    assert torch.equal(process.step(torch.zeros(1, 2), 500, 400).variance, before_numbers)


def test_a_step_in_inference_mode_leaves_later_gradients_alone():
    schedule = Schedule.linear(37)
    weight = torch.ones((), requires_grad=True)
    process = ReverseProcess(lambda x, t: NoisePrediction(weight * x), ForwardProcess(schedule), "beta", None)
    x_t = torch.ones(2, 3)
    with torch.inference_mode():
        process.step(x_t, 30, 20)
    process.step(x_t, 30, 20).mean.sum().backward()
    assert bool(weight.grad.isfinite())


def test_times_are_exact_under_a_default_dtype_of_half_precision():
    torch.set_default_dtype(torch.bfloat16)
    try:
        levels = [float(Schedule.linear(1001).alpha_bar(t)) for t in (501, 500)]
        times = [int(Schedule.linear().check_times(t)) for t in (501.0, 501)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert levels[0] != levels[1]
    assert times == [501, 501]


def test_a_covariance_that_somebody_adds_is_found_by_its_name():
    class Twice(Covariance):
        name = "npr_twice"
        head = "npr"
        rows = (Row("Twice-DDPM", 1.0, noise_cap=1.0),)

        def second_moment(self, prediction):
            return Diagonal(2 * prediction.head_in_clean_units("npr"))

    try:
        assert METHODS["Twice-DDPM"].covariance == "npr_twice"
        data = oracle.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.01, 0.01])
        schedule = Schedule.linear()
        process = METHODS["Twice-DDPM"].reverse_process(data.network(schedule), schedule, None)
        single = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "npr", None)
        x_t = torch.zeros(3, 1, dtype=torch.float64)
        torch.testing.assert_close(process.posterior(x_t, 500).variance, 2 * single.posterior(x_t, 500).variance)
    finally:
        del Covariance.registry["npr_twice"]
    assert "Twice-DDPM" not in METHODS


def test_a_covariance_with_a_number_of_its_own_is_scored_by_elbo_and_leaves_sweeps_as_they_are():
    class Halved(OneNumber):
        name = "halved"
        number = "half_the_noise"

        @staticmethod
        def variance_of_noise(number):
            return 1 - number

    try:
        data = oracle.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.01, 0.01])
        schedule = Schedule.linear(100)
        process = ReverseProcess(
            data.network(schedule), ForwardProcess(schedule), Halved(lambda t: torch.tensor(0.5)), None
        )
        x_0 = data.sample(8)
        assert bool(elbo(process, x_0, Trajectory.even(schedule, 5)).total.isfinite().all())
        plain = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "beta_tilde", None)
        assert "halved" not in cost_table(plain, x_0).covariances
        with pytest.raises(ValueError, match="'halved' needs half_the_noise per time, which a sweep does not measure"):
            cost_table(plain, x_0, ["halved"])
        with pytest.raises(ValueError, match=r"needs one number per time: pass Halved\(numbers\) instead of its name"):
            ReverseProcess(data.network(schedule), ForwardProcess(schedule), "halved", None)
    finally:
        del Covariance.registry["halved"]


def test_a_covariance_has_a_posterior_or_a_step_of_its_own():
    """A step beside a posterior would never be asked."""
    with pytest.raises(ValueError, match="Both needs a posterior, .* or a step of its own"):

        class Both(OneNumber):
            def step(self, prediction, posterior, bridge, anchor):
                return bridge.apply(posterior, anchor)

    with pytest.raises(ValueError, match="Neither needs a posterior"):

        class Neither(OneNumber):
            has_posterior = False


def test_a_name_that_another_covariance_has_is_refused_and_one_defined_again_replaces_itself():
    before = Covariance.registry["npr"]
    with pytest.raises(ValueError, match="'npr' belongs to optcov.covariances.residual.Residual; give Mine another"):

        class Mine(Covariance):
            name = "npr"

    assert Covariance.registry["npr"] is before

    def cell() -> type[Covariance]:
        class Own(Covariance):
            name = "own"

        return Own

    try:
        first, second = cell(), cell()
        assert Covariance.registry["own"] is second is not first
    finally:
        del Covariance.registry["own"]
