"""The log-probability of what a scheduler draws, which reinforcement learning asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from optcov.integrations.diffusers import FlowMatchOptimalCovarianceScheduler, OptimalCovarianceScheduler

NUMBERS = {"times": [0.25, 0.5, 1.0], "mean_square_noise": [0.9, 0.9, 0.9], "mean_square_residual": [0.2, 0.3, 0.4]}


def flow(**options: Any) -> Any:
    scheduler = FlowMatchOptimalCovarianceScheduler(shift=3.0, **options)
    scheduler.set_timesteps(sigmas=[0.8, 0.5, 0.3, 0.1])
    return scheduler


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 4, 8, 8, generator=generator)


def steps(scheduler: Any) -> list[tuple[Any, Tensor, Tensor]]:
    """Every step of a run with what went into it."""
    x, output = batch()
    made = []
    for t in scheduler.timesteps:
        step = scheduler.step(output, t, x, generator=torch.Generator().manual_seed(1))
        made.append((step, x, t))
        x = step.prev_sample
    return made


def test_a_step_without_noise_has_no_log_probability() -> None:
    assert [step.log_prob for step, _, _ in steps(flow())] == [None] * 4


@pytest.mark.parametrize("options", [{"eta": 1.0}, {"covariance": "npr_isotropic", "numbers": NUMBERS}])
def test_the_log_probability_is_that_of_a_normal_distribution(options: dict[str, Any]) -> None:
    scheduler = flow(**options)
    for step, x, t in steps(scheduler)[:-1]:
        still = flow(**options)
        mean = still.step(batch()[1], t, x, variance_noise=torch.zeros_like(x)).prev_sample
        still = flow(**options)
        one = still.step(batch()[1], t, x, variance_noise=torch.ones_like(x)).prev_sample
        expected = Normal(mean.double(), (one - mean).double()).log_prob(step.prev_sample.double()).flatten(1).sum(1)
        torch.testing.assert_close(step.log_prob, expected, rtol=1e-3, atol=1e-2)


def test_the_last_step_is_the_mean_and_has_none() -> None:
    *_, last = steps(flow(eta=1.0))
    assert last[0].log_prob is None


def test_a_draw_made_before_has_the_log_probability_that_it_had() -> None:
    scheduler = flow(eta=1.0)
    step, x, t = steps(scheduler)[0]
    output = batch()[1].requires_grad_()
    again = flow(eta=1.0).step(output, t, x, prev_sample=step.prev_sample)
    torch.testing.assert_close(again.log_prob, step.log_prob)
    assert torch.equal(again.prev_sample, step.prev_sample)
    again.log_prob.sum().backward()
    assert float(output.grad.abs().max()) > 0


def test_draws_of_a_run_are_scored_in_any_order() -> None:
    seen, scheduler = steps(flow(eta=1.0))[:-1], flow(eta=1.0)
    for step, x, t in reversed(seen):
        again = scheduler.step(batch()[1], t, x, prev_sample=step.prev_sample)
        torch.testing.assert_close(again.log_prob, step.log_prob)


def test_a_time_of_another_run_has_no_log_probability() -> None:
    x, output = batch()
    with pytest.raises(ValueError, match="timestep 123 is not one of this run's"):
        flow(eta=1.0).step(output, 123.0, x, prev_sample=x)


def test_schedulers_with_betas_tell_it_too() -> None:
    scheduler = OptimalCovarianceScheduler(clip_sample=False, eta=1.0)
    scheduler.set_timesteps(3)
    x, output = batch()
    step = scheduler.step(output, scheduler.timesteps[0], x, generator=torch.Generator().manual_seed(1))
    assert step.log_prob.shape == (2,)
    assert step.log_prob.isfinite().all()


def test_without_a_generator_the_first_noise_decides_the_others() -> None:
    def drawn(x: Tensor) -> Tensor:
        scheduler = flow(eta=1.0)
        for t in scheduler.timesteps:
            x = scheduler.step(batch()[1], t, x).prev_sample
        return x

    x = batch()[0]
    torch.manual_seed(3)
    first = drawn(x)
    torch.manual_seed(4)
    assert torch.equal(drawn(x), first)
    assert not torch.allclose(drawn(-x) - drawn(x), -2 * x * 0, atol=1e-3)
