"""Time a sampling step against the bare network, and our sampler against diffusers' own pipeline.

    python benchmarks/sampling.py [fashion]           a bundle of a UNet2DModel: an embedded model, or a directory

Everything runs in turns within one process, so that other load hits all alike. Printed are the median of the ratios
round by round, its 95 % confidence interval by the sign test, and the medians of both sides in seconds.
A bound counts as broken only if the whole interval lies above it: one run's median scatters by a few per cent.

    step / forward          one reverse step with an NPR convolution head, at most 1.02 of the bare forward pass: a head
                            as a fit makes it, with the backbone's normalisation; then one with a normalisation of its
                            own, as gradient descent leaves it
    sampler / pipeline      optcov's sampler against DDPMPipeline with DDPMScheduler: the same steps and variance
                            (beta-tilde, no head), at most 1. "same module": the pipeline runs the network as optcov
                            loaded it, channels last; "as loaded": DDPMPipeline.from_pretrained, as its user has it

glibc is told to keep large blocks instead of returning them to the system at once: fresh pages cost more than what is
measured here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

import optcov
from optcov import ForwardProcess, ReverseProcess
from optcov.bundle import Bundle, Sampler, find_bundle
from optcov.experiments.timing import Timing, Work, interleaved, paired_ratio
from optcov.networks import Backbone, ConvHead, HeadedNetwork

STEP_BOUND, SAMPLER_BOUND = 1.02, 1.0
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}


def conv_head(unet: Any, own_norm: bool) -> ConvHead:
    """A convolution head whose normalisation is that of the U-Net, or other than it."""
    norm = unet.conv_norm_out
    head = ConvHead(norm.num_channels, unet.config.out_channels, norm.num_groups, norm.eps).eval()
    head.norm.load_state_dict(norm.state_dict())
    if own_norm:
        head.norm.weight.data += 0.1
    return head.requires_grad_(False)


def steps(bundle: Bundle, batch: int) -> dict[str, Work]:
    """The bare forward pass, and a step with either head."""
    shape = (batch, *bundle.image_shape)
    x_t, noise = torch.randn(shape), torch.randn(shape)

    @torch.no_grad()
    def forward() -> object:
        return bundle.unet(x_t, torch.full((batch,), 499.0)).sample

    def step(own_norm: bool) -> Work:
        heads = {"npr": conv_head(bundle.unet, own_norm)}
        network = HeadedNetwork(Backbone.of(bundle.unet), bundle.network.native_schedule, heads).eval()
        process = ReverseProcess(network.with_schedule(bundle.schedule), ForwardProcess(bundle.schedule), "npr")

        @torch.no_grad()
        def once() -> object:
            return process.step_from(process.predict(x_t, 500), 400).sample(noise)

        return once

    return {"forward": forward, "step, fitted head": step(False), "step, own norm": step(True)}


def samplers(bundle: Bundle, directory: str, batch: int, count: int) -> dict[str, Work]:
    """Our sampler, and diffusers' pipeline with the same module and as it loads it."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()

    def pipeline(loaded: Any) -> Work:
        loaded.set_progress_bar_config(disable=True)
        return lambda: loaded(batch, num_inference_steps=count, output_type="pt")

    ours = Sampler(bundle, "DDPM, beta-tilde", count)
    same = DDPMPipeline(bundle.unet, DDPMScheduler())
    with tempfile.TemporaryDirectory() as place:
        DDPMPipeline(UNet2DModel.from_pretrained(directory), DDPMScheduler()).save_pretrained(place)
        loaded = DDPMPipeline.from_pretrained(place)
    return {
        "sampler": lambda: ours.draw(range(batch)),
        "pipeline, same module": pipeline(same),
        "pipeline, as loaded": pipeline(loaded),
    }


def holds(timings: Mapping[str, Timing], ours: str, theirs: str, bound: float) -> bool:
    """Print a ratio; whether its interval reaches down to the bound."""
    middle, low, high = paired_ratio(timings[ours], timings[theirs])
    seconds = f"{timings[ours].median:.3f} s / {timings[theirs].median:.3f} s"
    verdict = "holds" if high <= bound else "broken" if low > bound else "undecided"
    print(f"{ours + ' / ' + theirs:34s} {middle:.3f} [{low:.3f}, {high:.3f}]   {seconds}   bound {bound}: {verdict}")
    return low <= bound


def main() -> None:
    """Measure all ratios; a broken bound ends with an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?", default="fashion", help="embedded model, or directory of a bundle")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=101, help="of single steps; a third as many of whole runs")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    bundle = optcov.load(options.bundle, "linear")
    single = interleaved(steps(bundle, options.batch), options.rounds, warm_up=3)
    kept = [holds(single, name, "forward", STEP_BOUND) for name in single if name != "forward"]
    directory = str(find_bundle(options.bundle) / "unet")
    whole = interleaved(samplers(bundle, directory, options.batch, options.steps), max(7, options.rounds // 3))
    kept += [holds(whole, "sampler", name, SAMPLER_BOUND) for name in whole if name != "sampler"]
    if not all(kept):
        raise SystemExit("a bound does not hold")


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    main()
