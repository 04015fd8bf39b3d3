"""What a sweep adds to the network's own time, at t = N = 1000 with a batch of 50 images of 3x32x32.

Three times, interleaved in one run: the network alone; the sweep's work on one batch outside the network, with the
costs of all 999 earlier times at its end; and the same costs by a loop over s, on the same predictions.

    OMP_NUM_THREADS=1 python benchmarks/sweep.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule
from optcov.likelihood.accumulate import Sums, TimeColumn
from optcov.likelihood.costs import TimeGrid
from optcov.likelihood.priced import PricedCovariances
from optcov.likelihood.terms import observe, seeded_noise, transition_cost

T = 1000
BATCH, SHAPE = 50, (3, 32, 32)


def small_unet(channels_last: bool) -> torch.nn.Module:
    """A U-Net of about 0.84 GFLOP (multiplications and additions) an image."""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(40, 72, 112),
        layers_per_block=1,
        attention_head_dim=32,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )
    return unet.eval().to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def timed(work: Callable[[], object]) -> float:
    """CPU seconds, which other processes disturb less than the clock."""
    start = time.process_time()
    work()
    return time.process_time() - start


@torch.no_grad()
def measure(repeats: int, loop_steps: int, channels_last: bool) -> None:
    """Print the ratios."""
    unet = small_unet(channels_last)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH, *SHAPE), generator=generator) / 127.5 - 1
    times = torch.full((BATCH,), float(T - 1))
    x_t = torch.randn(BATCH, *SHAPE, generator=generator)
    noise = unet(x_t, times).sample
    head = torch.rand(BATCH, *SHAPE, generator=generator) * 0.01

    def network(x: torch.Tensor, t: float) -> NoisePrediction:
        return NoisePrediction(noise, {"npr": head})  # the network is timed on its own

    schedule = Schedule.linear(T)
    process = ReverseProcess(network, ForwardProcess(schedule), "npr")
    grid = TimeGrid(process.forward, range(1, T + 1))
    sums = Sums(
        process, grid, PricedCovariances(["npr"], process.forward, {}), ["paper"], "exact", 8, images[0].numel()
    )
    group = torch.arange(BATCH) % 8

    def sweep() -> None:
        eps = seeded_noise(schedule, 0, range(BATCH), SHAPE, torch.float32)(T)
        column.add(observe(process, images, T, eps), eps, group)

    def per_time() -> None:
        sums.finish(T - 1, column)
        TimeColumn(sums, T - 1)

    def loop() -> None:
        seen = observe(process, images, T, x_t)
        for s in torch.linspace(1, T - 1, loop_steps).long().tolist():
            transition_cost(process, seen, s)

    column = TimeColumn(sums, T - 1)
    rounds = [
        (timed(lambda: unet(x_t, times)), timed(sweep), timed(per_time), timed(loop) * (T - 1) / loop_steps)
        for _ in range(repeats + 1)
    ]
    bare, batch, once, per_step = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
    print(f"network, batch of {BATCH}:            {bare * 1e3:7.1f} ms")
    print(f"sweep outside it, per batch:     {batch * 1e3:7.1f} ms = {batch / bare:.1%} of the network")
    print(f"  once per time, for all images: {once * 1e3:7.1f} ms = {once / bare:.1%} of one batch")
    print(f"loop over all s, per batch:      {per_step * 1e3:7.1f} ms = {per_step / bare:.0%} of the network")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loop-steps", type=int, default=20, help="steps of the loop that are timed and scaled up")
    parser.add_argument("--channels-last", action="store_true", help="as optcov loads a network: a quarter faster")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure(arguments.repeats, arguments.loop_steps, arguments.channels_last)
