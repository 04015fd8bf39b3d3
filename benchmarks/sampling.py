"""Time a sampling step against the bare network, and our sampler against diffusers' own pipeline.

    python benchmarks/sampling.py path/to/unet        a UNet2DModel of the VP SDE, in diffusers' format

Ratios of interleaved medians within one run: other load on the machine hits both sides alike. Both sides run the same
module, laid out as optcov loads it.

    step / forward          one reverse step with an NPR convolution head, at most 1.02 of the bare forward pass: a head
                            as a fit makes it, with the backbone's normalisation; then one with a normalisation of its
                            own, as gradient descent leaves it
    sample / pipeline       optcov.sample against DDPMPipeline with DDPMScheduler: the same network, steps and variance
                            (beta-tilde, no head), at most 1

glibc is told to keep large blocks instead of returning them to the system at once: fresh pages cost more than what is
measured here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory
from optcov.networks import Backbone, ConvHead, HeadedNetwork
from optcov.sampling import sample

STEP_BOUND, SAMPLER_BOUND = 1.02, 1.0
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median of ours over median of theirs, and both medians in seconds, in turns after a warm-up."""
    ours(), theirs()
    pairs = []
    for number in range(rounds):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        taken = {first: seconds(first), second: seconds(second)}
        pairs.append((taken[ours], taken[theirs]))
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return mine / other, mine, other


def conv_head(unet: torch.nn.Module, own_norm: bool) -> ConvHead:
    """A convolution head whose normalisation is that of the U-Net, or other than it."""
    norm = unet.conv_norm_out
    head = ConvHead(norm.num_channels, unet.config.out_channels, norm.num_groups, norm.eps).eval()
    head.norm.load_state_dict(norm.state_dict())
    if own_norm:
        head.norm.weight.data += 0.1
    return head.requires_grad_(False)


def main() -> None:
    """Measure both ratios; a bound that does not hold ends with an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("unet", help="directory of a UNet2DModel")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel.from_pretrained(options.unet).eval().requires_grad_(False)
    unet = unet.to(memory_format=torch.channels_last)
    config, schedule = unet.config, Schedule.linear()
    shape = (options.batch, config.in_channels, config.sample_size, config.sample_size)
    x_t, noise = torch.randn(shape), torch.randn(shape)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return unet(x_t, torch.full((len(x_t),), 499.0)).sample

    shares = {}
    for name, own_norm in (("fitted", False), ("own norm", True)):
        head = conv_head(unet, own_norm)
        network = HeadedNetwork(Backbone.unet(unet), Schedule.vp_sde(), {"npr": head}).on(schedule).eval()
        process = ReverseProcess(network, ForwardProcess(schedule), "npr")

        @torch.no_grad()
        def step(process: ReverseProcess = process) -> torch.Tensor:
            return process.step_from(process.predict(x_t, 500), x_t, 500, 400).sample(noise)

        shares[name], mine, other = ratio(step, forward, options.rounds)
        print(f"step / forward ({name:8s})  {shares[name]:.3f}   ({mine:.3f} s / {other:.3f} s)   bound {STEP_BOUND}")

    pipeline = DDPMPipeline(unet, DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    trajectory = Trajectory.even(schedule, options.steps)
    bare = HeadedNetwork(Backbone.unet(unet), Schedule.vp_sde()).on(schedule).eval()
    plain = ReverseProcess(bare, ForwardProcess(schedule), "beta_tilde")
    whole, mine, other = ratio(
        lambda: sample(plain, trajectory, shape),
        lambda: pipeline(options.batch, num_inference_steps=options.steps, output_type="pt"),
        max(3, options.rounds // 2),
    )
    print(f"sample / pipeline          {whole:.3f}   ({mine:.3f} s / {other:.3f} s)   bound {SAMPLER_BOUND}")
    if max(shares.values()) > STEP_BOUND or whole > SAMPLER_BOUND:
        raise SystemExit("a bound does not hold")


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    main()
