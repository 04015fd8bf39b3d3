"""diffusers' schedulers as samplers of our networks: against the oracle, and against our own steps."""

from __future__ import annotations

import pytest
import torch

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory
from optcov.noise import batch_noise, image_generator
from optcov.oracle import GaussianMixture
from optcov.sampling import sample
from optcov.solvers import PEERS, peer
from optcov.solvers.peers import make_scheduler

SCHEDULE = Schedule.linear(100)
MIXTURE = GaussianMixture([0.3, 0.7], [[-0.5] * 4, [0.6] * 4], [0.05, 0.1])
NETWORK = MIXTURE.network(SCHEDULE)
SHAPE = (1, 2, 2)


def start(batch: int) -> torch.Tensor:
    return batch_noise(0, range(batch), 0, SHAPE)


def network(x_t, t):
    return NoisePrediction(NETWORK(x_t, t).noise)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_draws_the_data_distribution(name):
    """Share of the right component, level 6e-5, and the mean of each, with the bias of 50 steps."""
    count = 600
    result = peer(name, network, SCHEDULE, start(count), 50, seed=1)
    pixels = result.x_0.flatten(1)
    right = pixels.mean(1) > 0
    assert result.evaluations.tolist() == [50] * count
    assert float(right.double().mean()) == pytest.approx(0.7, abs=4 * (0.21 / count) ** 0.5 + 0.02)
    assert float(pixels[right].mean()) == pytest.approx(0.6, abs=0.04)
    assert float(pixels[~right].mean()) == pytest.approx(-0.5, abs=0.04)


def test_ddpm_of_diffusers_is_our_beta_tilde():
    process = ReverseProcess(network, ForwardProcess(SCHEDULE), "beta_tilde", data_range=(-1, 1))
    generators = [image_generator(3, image, 1) for image in range(4)]

    def noise(t, s):
        return torch.stack([torch.randn(SHAPE, generator=g) for g in generators])

    ours = sample(process, Trajectory.even(SCHEDULE, 12), start=start(4), noise=noise)
    theirs = peer("DDPM (diffusers)", network, SCHEDULE, start(4), 12, seed=3, data_range=(-1, 1)).x_0
    assert (ours - theirs).abs().max() < 1e-5


def test_ddim_of_diffusers_is_our_ddim():
    process = ReverseProcess(network, ForwardProcess(SCHEDULE, eta=0.0), "beta_tilde", data_range=(-1, 1))
    ours = sample(process, Trajectory([10, 20, 30, 40, 50, 60, 70, 80, 90, 100]), start=start(4))
    theirs = peer("DDIM (diffusers)", network, SCHEDULE, start(4), 10, data_range=(-1, 1)).x_0
    assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name, row in PEERS.items() if row.stochastic])
def test_noise_of_an_image_does_not_depend_on_its_batch(name):
    whole = peer(name, network, SCHEDULE, start(5), 6, seed=4).x_0
    part = peer(name, network, SCHEDULE, start(5)[2:4], 6, seed=4, indices=[2, 3]).x_0
    assert torch.allclose(whole[2:4], part, atol=1e-6)


@pytest.mark.parametrize("name", ["DPM-Solver++", "SDE-DPM-Solver++", "UniPC"])
def test_solvers_get_our_noise_levels(name):
    scheduler = make_scheduler(name, Schedule.linear(), 7)
    schedule, times = Schedule.linear(), scheduler.timesteps + 1
    expected = torch.exp(-schedule.log_snr(times) / 2).float()
    assert torch.allclose(scheduler.sigmas[:-1], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["DPM-Solver++, Karras times", "UniPC, Karras times"])
def test_solvers_at_karras_times_visit_karras_sigmas(name):
    sigmas = make_scheduler(name, Schedule.linear(), 7).sigmas[:-1]
    first, last = (float(torch.exp(-Schedule.linear().log_snr(t) / 2)) for t in (1000, 1))
    assert torch.allclose(sigmas ** (1 / 7), torch.linspace(first ** (1 / 7), last ** (1 / 7), 7), rtol=1e-4)


def test_a_bad_value_stops_with_step_time_and_samples():
    def failing(x_t, t):
        noise = network(x_t, t).noise
        noise[1] = torch.nan if t < 50 else 0.0
        return NoisePrediction(noise)

    with pytest.raises(ValueError, match=r"first at step \d+ \(time [34]\d\), in samples \[1\]"):
        peer("UniPC", failing, SCHEDULE, start(3), 10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: peer("Heun", network, SCHEDULE, start(2), 5), "unknown peer 'Heun'; choose one of DPM-Solver"),
        (lambda: peer("UniPC", network, Schedule.vp_sde(), start(2), 5), "match the network to a discrete schedule"),
        (lambda: peer("UniPC", network, SCHEDULE, start(2), 1), "steps = 1 is outside 2..100"),
        (lambda: peer("DDIM (diffusers)", network, SCHEDULE, start(2), 30), "must divide 100; take 25 or 50|20 or 25"),
        (
            lambda: peer("DDPM (diffusers)", network, SCHEDULE, start(2), 5, data_range=(0, 1)),
            "diffusers clips to a range around 0 only",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
