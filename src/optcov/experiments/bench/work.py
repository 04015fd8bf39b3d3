"""The pieces of work that benchmarks time: ours, and what it is compared with, on the same network and images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from optcov.experiments.timing import Work
from optcov.fitting import Batch, HeadObjective, new_heads
from optcov.fitting.closed_form import apply, log_estimate, transposed_product
from optcov.fitting.objectives import observe as observe_training
from optcov.fitting.rows import Rows
from optcov.forward import ForwardProcess
from optcov.likelihood.accumulate import Sums, TimeColumn
from optcov.likelihood.costs import TimeGrid
from optcov.likelihood.priced import PricedCovariances
from optcov.likelihood.terms import observe, seeded_noise, transition_cost
from optcov.networks import Backbone, ConvHead, HeadedNetwork, ResidualHead
from optcov.networks.unet import build_unet
from optcov.prediction import NoisePrediction
from optcov.reverse import ReverseProcess
from optcov.sampling import sample
from optcov.schedule import Schedule
from optcov.trajectory import Trajectory

LOOP_STEPS = 10  # of the loop over s that are timed and scaled up
PLAIN_ROWS = 12  # of the table of the dynamic program that are timed and scaled up
LONGEST = 100  # largest K of the dynamic program
SAMPLER_STEPS = 3


@final
@dataclass(frozen=True)
class BenchSize:
    """How large the work is."""

    rounds: int = 15
    batch: int = 32
    image_size: int = 28
    channels: tuple[int, ...] = (32, 64, 96)
    times: int = 1000  # N of the sweep and the dynamic program


@final
@dataclass(frozen=True)
class Contest:
    """Two pieces of work; theirs may be a part, in which case scale is the share that was done."""

    ours_name: str
    ours: Work
    theirs_name: str
    theirs: Work
    scale: float = 1.0


def heads(size: BenchSize) -> Contest:
    """A reverse step that evaluates SN and NPR convolution heads and draws."""
    return _step(size, {name: _conv_head(size) for name in ("npr", "sn")}, "a step with SN and NPR heads")


def heads_residual(size: BenchSize) -> Contest:
    """A reverse step with one residual head."""
    width = size.channels[0]
    head = ResidualHead(width, 1, 4 * width, groups=8).eval()
    return _step(size, {"npr": head}, "a step with a residual NPR head")


def sampler(size: BenchSize) -> Contest:
    """Our sampler with a head against diffusers' DDPM pipeline on the same U-Net."""
    from diffusers import DDPMPipeline, DDPMScheduler

    return _pipeline(size, 1.0, "optcov.sample, NPR-DDPM", lambda unet: DDPMPipeline(unet, DDPMScheduler()))


def sampler_ddim(size: BenchSize) -> Contest:
    """The same of the DDIM forward process."""
    from diffusers import DDIMPipeline, DDIMScheduler

    return _pipeline(size, 0.0, "optcov.sample, NPR-DDIM", lambda unet: DDIMPipeline(unet, DDIMScheduler()))


def stage2(size: BenchSize) -> Contest:
    """One step of AdamW on SN and NPR heads, its forward pass of the backbone included."""
    unet = _unet(size)
    network, batch = _headed(unet, {}), _batch(size)
    objective = HeadObjective(network, new_heads(network, batch.x_0[:1], ["sn", "npr"], "conv"))
    optimizer = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        objective(batch).mean().backward()
        optimizer.step()

    return Contest("an AdamW step for SN and NPR", step, "the bare forward pass", _forward(unet, batch.x_0))


def closed_form(size: BenchSize) -> Contest:
    """One batch of a pass of Fisher scoring for SN and NPR, its forward pass of the backbone included."""
    unet = _unet(size)
    network, batch = _headed(unet, {}), _batch(size)
    process = ForwardProcess(network.schedule)
    tasks = new_heads(network, batch.x_0[:1], ["sn", "npr"], "conv")
    weights = torch.zeros(9 * size.channels[0] + 1, 1, dtype=torch.float64)

    @torch.no_grad()
    def score() -> None:
        example, output = observe_training(network, process, batch)
        inputs = tasks["sn"].module.inputs(output.features)
        regressions = {name: task.regression(example) for name, task in tasks.items()}
        rows = Rows(inputs, batch.times, example.log_snr, regressions)
        for name, task in tasks.items():
            log_g = log_estimate(task.module, rows, regressions[name], apply(task.module, rows, weights))
            transposed_product(task.module, rows, regressions[name].target * torch.exp(-log_g) - 1)

    return Contest(
        "a batch of Fisher scoring for SN and NPR", score, "the bare forward pass", _forward(unet, batch.x_0)
    )


def sweep(size: BenchSize) -> Contest:
    """Prices of all steps from t = N for one batch, outside the network, against a loop over s."""
    N, shape = size.times, _shape(size)
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(0, 256, shape, generator=generator) / 127.5 - 1
    noise, head = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) * 0.01

    def network(x_t: Tensor, t: Any) -> NoisePrediction:
        return NoisePrediction(noise, {"npr": head})

    schedule = Schedule.linear(N)
    process = ReverseProcess(network, ForwardProcess(schedule), "npr")
    grid = TimeGrid(process.forward, range(1, N + 1))
    sums = Sums(process, grid, PricedCovariances(["npr"], process.forward, {}), ["paper"], "exact", 8, x_0[0].numel())
    group = torch.arange(size.batch) % 8
    seen = observe(process, x_0, N, noise)

    @torch.no_grad()
    def ours() -> None:
        eps = seeded_noise(schedule, 0, range(size.batch), shape[1:], torch.float32)(N)
        column: TimeColumn = TimeColumn(sums, N - 1)
        column.add(observe(process, x_0, N, eps), eps.double(), group)
        sums.finish(N - 1, column)

    @torch.no_grad()
    def loop() -> None:
        for s in torch.linspace(1, N - 1, LOOP_STEPS).long().tolist():
            transition_cost(process, seen, s)

    return Contest("the sweep at t = N", ours, "a loop over all s", loop, LOOP_STEPS / (N - 1))


def dynamic_program(size: BenchSize) -> Contest:
    """Optimal trajectories of all lengths up to 100 against all N rows, each for all pairs (s, t)."""
    N = size.times
    s, t = np.meshgrid(np.arange(N + 1), np.arange(N + 1), indexing="ij")
    noise = np.random.default_rng(0).random((N + 1, N + 1))
    costs = (t - s) ** 2 / (1 + 0.01 * s * t) + 5 / (s + 1) + 0.1 * noise
    upper = np.where(np.triu(np.ones(costs.shape, dtype=bool), 1), costs, np.inf)

    def plain() -> None:
        total = upper[0].copy()
        for _ in range(PLAIN_ROWS):
            sums = total[:, None] + upper
            total = sums[sums.argmin(0), np.arange(N + 1)]

    K = min(LONGEST, N)
    return Contest(
        f"optimal trajectories, all K <= {K}",
        lambda: Trajectory.optimal_all(costs, K),
        f"all {N} rows",
        plain,
        PLAIN_ROWS / N,
    )


def _pipeline(size: BenchSize, eta: float, name: str, build: Callable[[nn.Module], Any]) -> Contest:
    unet, schedule = _unet(size), Schedule.linear()
    process = ReverseProcess(_headed(unet, {"npr": _conv_head(size)}), ForwardProcess(schedule, eta), "npr")
    pipeline = build(unet)
    pipeline.set_progress_bar_config(disable=True)
    trajectory = Trajectory.even(schedule, SAMPLER_STEPS)
    return Contest(
        name,
        lambda: sample(process, trajectory, _shape(size)),
        f"diffusers' {type(pipeline).__name__}",
        lambda: pipeline(size.batch, num_inference_steps=SAMPLER_STEPS, output_type="pt"),
    )


def _step(size: BenchSize, modules: dict[str, Any], name: str) -> Contest:
    unet = _unet(size)
    schedule = Schedule.linear()
    process = ReverseProcess(_headed(unet, modules), ForwardProcess(schedule), "npr")
    x_t, noise = _batch(size).noise, torch.randn(_shape(size), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def step() -> object:
        return process.step_from(process.predict(x_t, 500), 400).sample(noise)

    return Contest(name, step, "the bare forward pass", _forward(unet, x_t))


def _unet(size: BenchSize) -> nn.Module:
    return build_unet((1, size.image_size, size.image_size), size.channels).eval().requires_grad_(False)


def _headed(unet: nn.Module, modules: dict[str, Any]) -> HeadedNetwork:
    network = HeadedNetwork(Backbone.of(unet), Schedule.vp_sde(), modules)
    return (network.with_schedule(Schedule.linear()) if modules else network).eval().requires_grad_(False)


def _conv_head(size: BenchSize) -> ConvHead:
    return ConvHead(size.channels[0], 1, groups=8).eval()


def _forward(unet: nn.Module, x_t: Tensor) -> Work:
    return torch.no_grad()(partial(unet, x_t, torch.full((len(x_t),), 499.0)))


def _batch(size: BenchSize) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.rand(_shape(size), generator=generator) * 2 - 1
    times = torch.rand(size.batch, generator=generator).double().clamp(min=1e-5)
    return Batch(x_0, times, torch.randn(_shape(size), generator=generator))


def _shape(size: BenchSize) -> tuple[int, int, int, int]:
    return size.batch, 1, size.image_size, size.image_size
