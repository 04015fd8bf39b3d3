from __future__ import annotations

import math

import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, generate, sample
from optcov.noise import batch_noise
from optcov.oracle import GaussianMixture

LINE = GaussianMixture([0.3, 0.7], [[-0.8], [0.5]], [0.02, 0.05])


def test_samples_match_the_reference_values(golden, reference):
    for name, expected in golden["sampling"]["runs"].items():
        _, design, index, pixel = name.split()
        eta, covariance = reference.designs[design]
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


def test_starting_and_step_noise_are_bit_equal_whatever_the_batch():
    process, trajectory = image_process()
    records: dict[int, list[torch.Tensor]] = {}
    for size in (1, 7, 64):
        noise_of = []

        def callback(step, noise_of=noise_of):
            noise_of.append((step.x_t if step.t == 1000 else (step.x_s - step.gaussian.mean), step.t))

        for batch in generate(process, trajectory, (1, 4, 4), [5, 6], batch_size=size, seed=1, callback=callback):
            assert batch.indices
        records[size] = [x for x, t in noise_of if t == 1000]
    start = torch.cat(records[1])
    assert torch.equal(start, records[7][0])
    assert torch.equal(start, records[64][0])
    assert torch.equal(start, batch_noise(1, [5, 6], 0, (1, 4, 4)))


def test_a_restart_and_a_second_process_draw_the_same_images():
    process, trajectory = image_process()
    whole = sample(process, trajectory, (10, 1, 4, 4), seed=9)
    rest = next(generate(process, trajectory, (1, 4, 4), range(6, 10), seed=9))
    torch.testing.assert_close(rest.images, whole[6:], rtol=0, atol=1e-6)
    odd = next(generate(process, trajectory, (1, 4, 4), range(1, 10, 2), seed=9))
    torch.testing.assert_close(odd.images, whole[1::2], rtol=0, atol=1e-6)


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


def test_gradients_flow_through_the_sampler_when_asked():
    process, trajectory = image_process()
    start = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    drawn = sample(process, trajectory, start=start, differentiable=True)
    (gradient,) = torch.autograd.grad(drawn.sum(), start)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0
    assert not sample(process, trajectory, start=start).requires_grad


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
        (lambda: sample(process, trajectory, (2, 3), indices=[1]), "1 indices for a batch of 2"),
        (lambda: sample(process, Trajectory([5, 2000]), (2, 3)), "time 2000 is outside"),
        (
            lambda: sample(process, trajectory, (2, 3), noise=lambda t, s: torch.zeros(1)),
            "supplied noise has shape",
        ),
        (lambda: list(generate(process, trajectory, (3,), 4, batch_size=0)), "batch_size = 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
