from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch

import recorded_run
from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, generate, sample
from optcov.oracle import GaussianMixture

LINE = GaussianMixture([0.3, 0.7], [[-0.8], [0.5]], [0.02, 0.05])


def test_samples_match_the_reference_values(golden, reference):
    for name, expected in golden["sampling"]["runs"].items():
        _, case, index, pixel = name.split()
        eta, covariance = reference.covariances[case]
        process = ReverseProcess(
            reference.network,
            ForwardProcess(reference.schedule, eta),
            covariance,
            mean_square_noise=reference.mean_square_noise,
        )
        drawn = sample(
            process,
            Trajectory.even(reference.schedule, 10),
            start=reference.x_t,
            noise=lambda t, s: reference.noise,
            noise_cap=float(pixel.split("=")[1]) if index.endswith("1") else None,
        )
        assert reference.differs(drawn, expected) <= 1e-10, name


def written_out(alpha_bar, times, network, covariance, eta, mean_square_noise, cap, x, noise):
    """The paper's sampler without our factorisation: its own coefficients, for VP schedules, in numpy."""
    for t, s in zip(reversed(times), [*reversed(times[:-1]), 0], strict=True):
        a_t, a_s = alpha_bar(t), alpha_bar(s)
        b_t, b_s, b_ts = 1 - a_t, 1 - a_s, 1 - a_t / a_s
        prediction = network(torch.from_numpy(x), t)
        eps, heads = prediction.noise.numpy(), {name: value.numpy() for name, value in prediction.heads.items()}
        x_0 = np.clip((x - math.sqrt(b_t) * eps) / math.sqrt(a_t), -1, 1)
        small = eta**2 * b_s * b_ts / b_t
        rest = math.sqrt(max(b_s - small, 0.0))
        if eta == 1:
            mean = math.sqrt(a_s) * b_ts / b_t * x_0 + math.sqrt(a_t / a_s) * b_s / b_t * x
        else:
            mean = math.sqrt(a_s) * x_0 + rest * eps
        cov = {
            "beta_tilde": 0.0,
            "analytic": b_t / a_t * (1 - mean_square_noise(t)),
            "npr": b_t / a_t * heads["npr"],
            "sn": b_t / a_t * (heads["sn"] - eps**2),
        }
        if covariance == "beta":
            variance = b_ts
        elif covariance == "range":  # not used at s = 0, where the mean is shown
            share = (heads["range"] + 1) / 2
            variance = np.exp(share * math.log(b_ts) + (1 - share) * math.log(small)) if s > 0 else 0.0
        else:
            variance = small + (math.sqrt(a_s) - rest * math.sqrt(a_t / b_t)) ** 2 * np.clip(cov[covariance], 0, 1)
        if s == times[0] and cap is not None:
            variance = np.minimum(variance, (cap * 2 / 255 * math.sqrt(math.pi / 2)) ** 2)
        x = mean + np.sqrt(variance) * noise if s > 0 else mean
    return x


def cosine_alpha_bar(n):
    level = [math.cos((i / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(n + 1)]
    return math.prod(1 - min(1 - after / before, 0.999) for before, after in itertools.pairwise(level))


SCHEDULES = {
    "cosine_1000": (Schedule.cosine(), cosine_alpha_bar),
    "linear_40": (Schedule.linear(40), lambda n: float(np.prod(1 - np.linspace(25e-4, 0.5, 40)[:n]))),
    "vp_sde": (Schedule.vp_sde(), lambda t: math.exp(-0.1 * t - 19.9 * t * t / 2)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_samples_on_other_schedules_match_the_papers_formulas_written_out(reference, name):
    schedule, alpha_bar = SCHEDULES[name]
    end = schedule.final_time

    def mean_square_noise(t):
        return 0.2 + 0.7 * float(t) / end

    numbers = mean_square_noise
    if schedule.steps:
        numbers = torch.tensor([mean_square_noise(t) for t in range(schedule.steps + 1)], dtype=torch.float64)
    for (eta, covariance), K, cap in itertools.product(reference.covariances.values(), (2, 10), (None, 1.0)):
        trajectory = Trajectory.even(schedule, K)
        process = ReverseProcess(
            reference.network, ForwardProcess(schedule, eta), covariance, mean_square_noise=numbers
        )
        drawn = sample(process, trajectory, start=reference.x_t, noise=lambda t, s: reference.noise, noise_cap=cap)
        expected = written_out(
            alpha_bar,
            list(trajectory.times),
            reference.network,
            covariance,
            eta,
            mean_square_noise,
            cap,
            reference.x_t.numpy(),
            reference.noise.numpy(),
        )
        np.testing.assert_allclose(drawn.numpy(), expected, rtol=0, atol=1e-10, err_msg=f"{covariance} {eta} {K} {cap}")


def smooth_network(x_t, t):
    """A nonlinear network without weights, whose samples depend on every pixel."""
    noise = torch.tanh(x_t) * 0.9
    return NoisePrediction(noise, {"npr": 0.1 + 0.1 * torch.sigmoid(x_t), "sn": noise.square() + 0.2})


def image_process(**settings):
    schedule = Schedule.linear()
    return ReverseProcess(smooth_network, ForwardProcess(schedule, **settings), "npr"), Trajectory.even(schedule, 5)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_images_do_not_depend_on_the_batch_size(batch_size):
    process, trajectory = image_process()
    seen = {}
    for batch in generate(process, trajectory, (1, 4, 4), 20, batch_size=batch_size, seed=3):
        assert len(batch.indices) == len(batch.images) <= batch_size
        seen.update(zip(batch.indices, batch.images, strict=True))
    assert list(seen) == list(range(20))
    whole = sample(process, trajectory, (20, 1, 4, 4), seed=3)
    torch.testing.assert_close(torch.stack(list(seen.values())), whole, rtol=0, atol=1e-5)


def test_noise_is_bit_equal_for_every_batch_size_and_for_two_processes(commands, tmp_path):
    """Starting and step noise of 66 images bit by bit, pixels within 1e-3."""
    images = list(range(66))
    noise, pixels = recorded_run.run(images, 64)
    assert len(noise) == 66 * 3  # the start and two steps: the last one shows its mean
    others = [recorded_run.run(images, size) for size in (1, 7)]
    code = "import json, sys, recorded_run; json.dump(recorded_run.run(json.loads(sys.argv[1]), 7), sys.stdout)"
    two = [commands.start_code(code, json.dumps(share), cwd=tmp_path) for share in (images[0::2], images[1::2])]
    shares = [json.loads(process.wait().out) for process in two]
    others.append(tuple({**shares[0][part], **shares[1][part]} for part in (0, 1)))
    for other_noise, other_pixels in others:
        assert other_noise == noise
        for image, values in pixels.items():
            assert other_pixels[image] == pytest.approx(values, abs=1e-3)


def test_a_restart_and_a_share_of_the_images_draw_the_same():
    process, trajectory = image_process()
    whole = sample(process, trajectory, (10, 1, 4, 4), seed=9)
    rest = next(generate(process, trajectory, (1, 4, 4), range(6, 10), seed=9))
    torch.testing.assert_close(rest.images, whole[6:], rtol=0, atol=1e-6)
    odd = next(generate(process, trajectory, (1, 4, 4), range(1, 10, 2), seed=9))
    torch.testing.assert_close(odd.images, whole[1::2], rtol=0, atol=1e-6)


def test_no_image_is_drawn_for_an_empty_share():
    process, trajectory = image_process()
    assert list(generate(process, trajectory, (1, 4, 4), 0)) == []
    for count in (-1, 2.5):
        with pytest.raises(ValueError, match=f"images = {count} is not a whole number"):
            list(generate(process, trajectory, (1, 4, 4), count))


def test_a_number_of_images_may_be_one_of_numpy():
    process, trajectory = image_process()
    batches = list(generate(process, trajectory, (1, 4, 4), np.int64(3), np.int64(2)))
    assert [batch.indices for batch in batches] == [(0, 1), (2,)]


def test_another_seed_draws_other_images():
    process, trajectory = image_process()
    assert not torch.equal(sample(process, trajectory, (2, 3), seed=0), sample(process, trajectory, (2, 3), seed=1))


def moments_within_error(drawn, bias):
    """Mean, variance and the weight of the left mode within 4.5 standard errors (level 1e-5) plus a bias of O(1/N)."""
    count = len(drawn)
    mean = float((LINE.weights * LINE.means[:, 0]).sum())
    variance = float((LINE.weights * (LINE.covariances[:, 0, 0] + LINE.means[:, 0].square())).sum()) - mean**2
    fourth = float((drawn - drawn.mean()).pow(4).mean())
    assert abs(float(drawn.mean()) - mean) < 4.5 * (variance / count) ** 0.5 + bias
    assert abs(float(drawn.var()) - variance) < 4.5 * ((fourth - variance**2) / count) ** 0.5 + bias
    between = -0.25  # q has almost no mass there, so that the weight left of it is 0.3 up to 0.0012
    assert abs(float((drawn < between).double().mean()) - 0.3) < 4.5 * (0.21 / count) ** 0.5 + bias + 0.0012


@pytest.mark.parametrize("eta", [1.0, 0.0])
@pytest.mark.parametrize("continuous", [False, True])
def test_with_all_steps_samples_have_the_moments_of_the_data(eta, continuous):
    """The bias of N Gaussian steps is O(1/N): 3/N is allowed, measured as below 1/N."""
    schedule = Schedule.vp_sde() if continuous else Schedule.linear(150)
    trajectory = Trajectory.even(schedule, 150)
    process = ReverseProcess(LINE.network(schedule), ForwardProcess(schedule, eta), "sn", None)
    start = torch.randn(4000, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    generator = torch.Generator().manual_seed(6)
    drawn = sample(
        process,
        trajectory,
        start=start,
        noise=lambda t, s: torch.randn(4000, 1, generator=generator, dtype=torch.float64),
        last_step="draw",
    )
    moments_within_error(drawn, bias=3 / 150)


def test_the_last_step_may_be_drawn():
    process, trajectory = image_process()
    by_mean = sample(process, trajectory, (2, 3), seed=0)
    drawn = sample(process, trajectory, (2, 3), seed=0, last_step="draw")
    assert not torch.equal(by_mean, drawn)


def test_the_noise_cap_bounds_the_step_that_lands_on_the_first_time():
    process, trajectory = image_process()
    steps = []
    sample(process, trajectory, (2, 3), noise_cap=1.0, callback=steps.append)
    cap = (2 / 255 * math.sqrt(math.pi / 2)) ** 2
    assert float(steps[-2].gaussian.variance.max()) <= cap * (1 + 1e-6)
    assert float(steps[-3].gaussian.variance.max()) > cap


def test_step_log_probabilities_are_defined_also_without_forward_noise():
    for eta in (1.0, 0.0):
        process, trajectory = image_process(eta=eta)
        steps = []
        sample(process, trajectory, (2, 3), callback=steps.append, last_step="draw")
        for step in steps:
            expected = torch.distributions.Normal(step.gaussian.mean, step.gaussian.variance.sqrt()).log_prob(step.x_s)
            torch.testing.assert_close(step.log_prob(), expected.sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eta", [1.0, 0.0])
def test_gradients_through_the_sampler_are_its_derivatives(eta):
    """Against differences of the drawn images, with the same noise."""
    schedule = Schedule.linear()
    process = ReverseProcess(smooth_network, ForwardProcess(schedule, eta), "sn", data_range=None)
    start = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)

    def drawn(x):
        return sample(process, Trajectory.even(schedule, 5), start=x, seed=2, differentiable=True, last_step="draw")

    assert torch.autograd.gradcheck(drawn, (start,))
    assert not sample(process, Trajectory.even(schedule, 5), start=start).requires_grad


def test_gradients_stay_finite_where_a_variance_is_clamped_to_zero():
    def network(x_t, t):
        noise = torch.tanh(x_t)
        return NoisePrediction(noise, {"sn": noise.square() - 0.1})  # h below eps_hat^2

    schedule = Schedule.linear()
    process = ReverseProcess(network, ForwardProcess(schedule, 0.0), "sn")
    start = torch.linspace(-0.5, 0.5, 6).reshape(2, 3).requires_grad_()
    drawn = sample(process, Trajectory.even(schedule, 5), start=start, differentiable=True)
    assert torch.autograd.grad(drawn.sum(), start)[0].isfinite().all()


def test_a_nan_is_reported_at_the_end_with_its_step_and_samples():
    calls = []

    def network(x_t, t):
        calls.append(t)
        noise = torch.zeros_like(x_t)
        noise[1] = float("nan") if t == 500 else 0.0
        return NoisePrediction(noise)

    schedule = Schedule.linear()
    process = ReverseProcess(network, ForwardProcess(schedule), "beta")
    with pytest.raises(ValueError, match=r"first at step 3 \(time 500\), in samples \[1\]"):
        sample(process, Trajectory.even(schedule, 5), (3, 2))
    assert calls == [1000, 750, 500, 251, 1]  # the loop never waited to look


def test_an_overflow_behind_finite_predictions_does_not_leave_the_sampler():
    def network(x_t, t):
        return NoisePrediction(torch.full_like(x_t, 3e38))

    schedule = Schedule.linear()
    process = ReverseProcess(network, ForwardProcess(schedule), "beta", data_range=None)
    with pytest.raises(ValueError, match=r"first at step 1 \(time 1000\), in samples \[0, 1, 2\]"):
        sample(process, Trajectory.even(schedule, 5), (3, 2))


def test_bad_requests_are_named():
    process, trajectory = image_process()
    unbounded = ReverseProcess(smooth_network, process.forward, "npr", data_range=None)
    for call, message in [
        (lambda: sample(process, trajectory), "pass the shape"),
        (lambda: sample(process, trajectory, (3,)), r"shape = \(3,\) is not"),
        (lambda: sample(process, trajectory, (0, 3)), r"shape = \(0, 3\) is not"),
        (lambda: sample(process, trajectory, (2, 3), start=torch.zeros(1, 3)), "pass one of them"),
        (
            lambda: sample(process, trajectory, (2, 3), last_step="noise"),
            "last_step = 'noise' is not one of mean, draw",
        ),
        (
            lambda: sample(unbounded, trajectory, (2, 3), noise_cap=1.0),
            "noise_cap = 1.0 counts 8-bit levels and needs",
        ),
        (lambda: sample(process, trajectory, (2, 3), noise_cap=0.0), "noise_cap = 0.0 must be a positive"),
        (lambda: sample(process, trajectory, (2, 3), noise_cap=1e200), "at most 255"),  # its square has no number
        (lambda: sample(process, trajectory, (2, 3), dtype=torch.long), "dtype = torch.int64 has no normal noise"),
        (lambda: sample(process, trajectory, (2, 3), indices=[1]), "1 image numbers for a batch of 2"),
        (lambda: sample(process, Trajectory([5, 2000]), (2, 3)), "time 2000 is outside"),
        (
            lambda: sample(process, trajectory, (2, 3), noise=lambda t, s: torch.zeros(1)),
            "supplied noise has shape",
        ),
        (lambda: list(generate(process, trajectory, (3,), 4, batch_size=0)), "batch_size = 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
