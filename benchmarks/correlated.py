"""What correlations gain in the bound, and what they cost in a step.

    python benchmarks/correlated.py bound BUNDLE DATA --images 64      bits/dim at even times, paired by image and noise
    python benchmarks/correlated.py step                               a correlated step against a diagonal one, 3x32x32

BUNDLE: one that `optcov fit` made, so that it has spectra. DATA: its test images, which no fit has seen.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch

import optcov
from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, cost_table
from optcov.data import load as load_data
from optcov.prediction import NoisePrediction

SCORED = ("npr_isotropic", "spectral", "npr", "npr_correlated", "sn", "sn_correlated")


def bound(bundle_directory: str, data: str, images: int, first: int, steps: int, schedule: str) -> None:
    """Print the bits/dim of each covariance, and its difference from NPR with a paired standard error."""
    bundle = optcov.load(bundle_directory, schedule=schedule)
    x_0 = load_data(data, "test").x_0(torch.arange(first, first + images))
    kinds = [name for name in SCORED if not name.startswith("sn") or "sn" in bundle.heads]
    process = ReverseProcess(bundle.network, ForwardProcess(bundle.schedule), "beta_tilde", bundle.data_range)
    trajectory = Trajectory.even(bundle.schedule, steps)
    table = cost_table(
        process,
        x_0,
        kinds,
        times=trajectory.times,
        last_variances=["paper"],
        groups=images,  # each image apart
        mean_square_residual=bundle.per_time("mean_square_residual"),
        spectra={name: bundle.spectrum(name) for name in bundle.spectra.names},
    )
    bits = {name: table.group_bits_per_dim(name, trajectory) for name in kinds}
    print(f"{bundle.name}, {schedule}, K = {steps}, even, test images {first} to {first + images - 1}")
    for name in kinds:
        difference = bits[name] - bits["npr"]
        error = float(difference.std()) / math.sqrt(images)
        line = f"{name:16} {float(bits[name].mean()):7.4f} bits/dim"
        if name != "npr":
            gain = float(difference.mean())
            line += f"   from npr {gain:+.4f} +- {error:.4f}, z = {gain / error:+.1f}"
        print(line)
    correlated, diagonal = bits.get("sn_correlated"), bits.get("sn")
    if correlated is not None and diagonal is not None:
        difference = correlated - diagonal
        error = float(difference.std()) / math.sqrt(images)
        print(f"sn_correlated from sn {float(difference.mean()):+.4f} +- {error:.4f}")


def step(batch: int, repeats: int, threads: int) -> None:
    """Print the cost of drawing one step by CNPR over that by NPR, beside a small U-Net."""
    from diffusers import UNet2DModel

    torch.set_num_threads(threads)
    blocks = {"down_block_types": ("DownBlock2D",) * 3, "up_block_types": ("UpBlock2D",) * 3}
    unet = UNet2DModel(32, 3, 3, block_out_channels=(32, 64, 64), layers_per_block=1, **blocks).eval()
    schedule = Schedule.linear()
    x_t, noise = torch.randn(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32)
    head = torch.rand(batch, 3, 32, 32) * 0.1 + 0.01

    def network(x: torch.Tensor, t: float) -> NoisePrediction:
        return NoisePrediction(unet(x, t).sample, {"npr": head})

    frequency = 1 + torch.arange(32, dtype=torch.float64)
    spectrum = (100 / (frequency[:, None].square() + frequency.square())).expand(3, 32, 32)
    forward = ForwardProcess(schedule)
    processes = {
        "npr": ReverseProcess(network, forward, "npr"),
        "npr_correlated": ReverseProcess(network, forward, "npr_correlated", spectrum=spectrum),
    }
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    with torch.no_grad():
        for number in range(repeats + 1):
            for name, process in processes.items():  # by turns, so that a busy machine slows both alike
                began = time.process_time()
                process.step(x_t, 500, 400).sample(noise)
                if number:
                    seconds[name].append(time.process_time() - began)
    ratios = [c / d for c, d in zip(seconds["npr_correlated"], seconds["npr"], strict=True)]
    own, other = (statistics.median(seconds[name]) for name in ("npr", "npr_correlated"))
    print(
        f"batch {batch} of 3x32x32, {threads} threads, CPU time a step: NPR {own:.3f} s, correlated NPR {other:.3f} s"
    )
    print(f"ratio {statistics.median(ratios):.3f}")
    with torch.no_grad():  # the rest of the step alone, where the network's time does not hide the difference
        prediction = processes["npr"].predict(x_t, 500)
        for name, process in processes.items():
            began = time.process_time()
            for _ in range(10):
                process.step_from(prediction, 400).sample(noise)
            print(f"{name:16} {1000 * (time.process_time() - began) / 10:.2f} ms beside the network")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    bounds = commands.add_parser("bound")
    bounds.add_argument("bundle")
    bounds.add_argument("data")
    bounds.add_argument("--images", type=int, default=64)
    bounds.add_argument("--first", type=int, default=0)
    bounds.add_argument("--steps", type=int, default=10)
    bounds.add_argument("--schedule", default="linear")
    steps = commands.add_parser("step")
    steps.add_argument("--batch", type=int, default=64)
    steps.add_argument("--repeats", type=int, default=5)
    steps.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.command == "bound":
        bound(given.bundle, given.data, given.images, given.first, given.steps, given.schedule)
    else:
        step(given.batch, given.repeats, given.threads)


if __name__ == "__main__":
    main()
