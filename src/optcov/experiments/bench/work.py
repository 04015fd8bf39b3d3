"""The pieces of work that benchmarks time: ours, and what it is compared with, on the same network and images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from optcov.covariances import Spectrum
from optcov.experiments.timing import Work
from optcov.fitting import Batch, HeadObjective, new_heads
from optcov.fitting.closed_form import apply, log_estimate, transposed_product
from optcov.fitting.objectives import observe as observe_training
from optcov.fitting.rows import Rows
from optcov.forward import ForwardProcess
from optcov.gaussian import Basis
from optcov.likelihood.accumulate import Sums, TimeColumn
from optcov.likelihood.costs import TimeGrid
from optcov.likelihood.priced import PricedCovariances
from optcov.likelihood.terms import observe, seeded_noise, transition_cost
from optcov.networks import Backbone, HeadedNetwork
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
FEWEST = 9  # rounds; six would do for an interval


@final
@dataclass(frozen=True)
class BenchSize:
    """How large the work is."""

    rounds: int = 15  # at most
    batch: int = 32
    image_size: int = 28
    colours: int = 1
    channels: tuple[int, ...] = (32, 64, 96)
    times: int = 1000  # N of the sweep and the dynamic program
    seconds: float = math.inf  # of a contest; the rounds that fit are run, but no fewer than FEWEST


@final
@dataclass(frozen=True)
class Contest:
    """Two pieces of work; theirs may be a part, in which case scale is the share that was done."""

    ours_name: str
    ours: Work
    theirs_name: str
    theirs: Work
    scale: float = 1.0
    bound: float | None = None  # what the ratio should not exceed


def heads(size: BenchSize) -> Contest:
    """A reverse step that evaluates SN and NPR heads and draws."""
    return _step(size, ["npr", "sn"], "timed", "a step with SN and NPR heads", bound=1.02)


def heads_deep(size: BenchSize) -> Contest:
    """A reverse step with one head that has hidden layers."""
    return _step(size, ["npr"], "deep", "a step with a deep NPR head")


def heads_residual(size: BenchSize) -> Contest:
    """A reverse step with one residual head."""
    return _step(size, ["npr"], "residual", "a step with a residual NPR head")


def sn_step(size: BenchSize) -> Contest:
    """A reverse step by an SN head against one by an NPR head."""
    unet = _unet(size)
    steps = (_one_step(*_stepping(size, unet, _fresh_heads(size, unet, [name]), name)) for name in ("sn", "npr"))
    return Contest("a step of SN", next(steps), "a step of NPR", next(steps), bound=1.02)


def correlated(size: BenchSize) -> Contest:
    """A reverse step that correlates pixels and colours against one that does not, with the same head."""
    size = replace(size, batch=2 * size.batch, image_size=size.image_size + 4, colours=3)
    unet = _unet(size)
    process, x_t, noise = _stepping(size, unet, _fresh_heads(size, unet, ["npr"]))
    frequency = 1 + torch.arange(size.image_size, dtype=torch.float64)
    powers = (100 / (frequency[:, None].square() + frequency.square())).expand(size.colours, -1, -1)
    mixture = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double())[0]
    pixels = ReverseProcess(
        process.network, process.forward, "npr_correlated", spectrum=Spectrum(lambda t: powers, Basis(mixture))
    )
    steps = (_one_step(of, x_t, noise) for of in (pixels, process))
    return Contest("a step of correlated NPR, in colour", next(steps), "a step of NPR", next(steps), bound=1.03)


def sampler(size: BenchSize) -> Contest:
    """Our sampler with a head against diffusers' DDPM pipeline on the same U-Net."""
    from diffusers import DDPMPipeline, DDPMScheduler

    return _pipeline(size, 1.0, "optcov.sample, NPR-DDPM", lambda unet: DDPMPipeline(unet, DDPMScheduler()))


def sampler_plain(size: BenchSize) -> Contest:
    """Our sampler without a head against the same pipeline: the same steps and the same variance."""
    from diffusers import DDPMPipeline, DDPMScheduler

    build = partial(DDPMPipeline, scheduler=DDPMScheduler())
    return _pipeline(size, 1.0, "optcov.sample, no head", build, head=False)


def sampler_loaded(size: BenchSize) -> Contest:
    """The same, with the pipeline's network laid out as diffusers loads it: not channels last."""
    from diffusers import DDPMPipeline, DDPMScheduler

    def build(unet: nn.Module) -> Any:
        return DDPMPipeline(_laid_out(copy.deepcopy(unet), torch.contiguous_format), DDPMScheduler())

    found = _pipeline(size, 1.0, "optcov.sample, no head", build, head=False)
    return replace(found, theirs_name="DDPMPipeline as diffusers loads it", bound=1.0)


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

    return Contest("an AdamW step for SN and NPR", step, "the bare forward pass", _forward(unet, batch.x_0), bound=1.06)


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
        "a batch of Fisher scoring for SN and NPR",
        score,
        "the bare forward pass",
        _forward(unet, batch.x_0),
        bound=1.06,
    )


def sweep(size: BenchSize) -> Contest:
    """Prices of all steps from t = N for one batch, outside the network, against a loop over s."""
    batch, time, loop = _sweeping(size)

    def ours() -> None:
        batch()
        time()

    return Contest("the sweep at t = N", ours, "a loop over all s", loop, LOOP_STEPS / (size.times - 1))


def sweep_share(size: BenchSize) -> Contest:
    """What a sweep does with one batch outside the network, against the network on that batch."""
    batch, _, _ = _sweeping(size)
    forward = _forward(_unet(size), _batch(size).x_0)
    return Contest("the sweep's own work on a batch", batch, "the bare forward pass", forward, bound=0.03)


def _sweeping(size: BenchSize) -> tuple[Work, Work, Work]:
    """A sweep's work per batch, what it does once per time, and some steps of a loop over s instead of both."""
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
    seen, columns = observe(process, x_0, N, noise), [TimeColumn(sums, N - 1)]

    @torch.no_grad()
    def batch() -> None:
        eps = seeded_noise(schedule, 0, range(size.batch), shape[1:], torch.float32)(N)
        columns[0].add(observe(process, x_0, N, eps), eps.double(), group)

    @torch.no_grad()
    def time() -> None:
        sums.finish(N - 1, columns[0])
        columns[0] = TimeColumn(sums, N - 1)

    @torch.no_grad()
    def loop() -> None:
        for s in torch.linspace(1, N - 1, LOOP_STEPS).long().tolist():
            transition_cost(process, seen, s)

    return batch, time, loop


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


def _pipeline(size: BenchSize, eta: float, name: str, build: Callable[[nn.Module], Any], head: bool = True) -> Contest:
    unet, schedule = _unet(size), Schedule.linear()
    network = _headed(unet, _fresh_heads(size, unet, ["npr"]) if head else {}).with_schedule(schedule)
    process = ReverseProcess(network, ForwardProcess(schedule, eta), "npr" if head else "beta_tilde")
    pipeline = build(unet)
    pipeline.set_progress_bar_config(disable=True)
    trajectory = Trajectory.even(schedule, SAMPLER_STEPS)
    return Contest(
        name,
        lambda: sample(process, trajectory, _shape(size)),
        f"diffusers' {type(pipeline).__name__}",
        lambda: pipeline(size.batch, num_inference_steps=SAMPLER_STEPS, output_type="pt"),
    )


def _step(size: BenchSize, names: list[str], kind: str, words: str, bound: float | None = None) -> Contest:
    unet = _unet(size)
    process, x_t, noise = _stepping(size, unet, _fresh_heads(size, unet, names, kind))
    return Contest(words, _one_step(process, x_t, noise), "the bare forward pass", _forward(unet, x_t), bound=bound)


def _stepping(
    size: BenchSize, unet: nn.Module, modules: dict[str, Any], covariance: str = "npr"
) -> tuple[ReverseProcess, Tensor, Tensor]:
    """A process with these heads, and where a step of it starts: x_t and the noise."""
    process = ReverseProcess(_headed(unet, modules), ForwardProcess(Schedule.linear()), covariance)
    return process, _batch(size).noise, torch.randn(_shape(size), generator=torch.Generator().manual_seed(1))


def _one_step(process: ReverseProcess, x_t: Tensor, noise: Tensor) -> Work:
    @torch.no_grad()
    def step() -> object:
        return process.step_from(process.predict(x_t, 500), 400).sample(noise)

    return step


def _unet(size: BenchSize) -> nn.Module:
    """Channels last, as `optcov.load` lays a network out."""
    unet = build_unet(_shape(size)[1:], size.channels).eval().requires_grad_(False)
    return _laid_out(unet, torch.channels_last)


def _laid_out(unet: nn.Module, layout: torch.memory_format) -> nn.Module:
    unet.to(memory_format=layout)  # type: ignore[call-overload]
    return unet


def _headed(unet: nn.Module, modules: dict[str, Any]) -> HeadedNetwork:
    network = HeadedNetwork(Backbone.of(unet), Schedule.vp_sde(), modules)
    return (network.with_schedule(Schedule.linear()) if modules else network).eval().requires_grad_(False)


def _fresh_heads(size: BenchSize, unet: nn.Module, names: list[str], kind: str = "timed") -> dict[str, Any]:
    """Heads as a fit begins with."""
    found = new_heads(_headed(unet, {}), _batch(size).x_0[:1], names, kind)
    return {name: task.module.eval() for name, task in found.items()}


def _forward(unet: nn.Module, x_t: Tensor) -> Work:
    return torch.no_grad()(partial(unet, x_t, torch.full((len(x_t),), 499.0)))


def _batch(size: BenchSize) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.rand(_shape(size), generator=generator) * 2 - 1
    times = torch.rand(size.batch, generator=generator).double().clamp(min=1e-5)
    return Batch(x_0, times, torch.randn(_shape(size), generator=generator))


def _shape(size: BenchSize) -> tuple[int, int, int, int]:
    return size.batch, size.colours, size.image_size, size.image_size
