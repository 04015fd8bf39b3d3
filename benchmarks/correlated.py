"""What a correlated step costs beside a diagonal one, for images of 3x32x32: python benchmarks/correlated.py

benchmarks/covariances.py measures what correlations gain.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from optcov import ForwardProcess, ReverseProcess, Schedule
from optcov.prediction import NoisePrediction


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
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    step(given.batch, given.repeats, given.threads)


if __name__ == "__main__":
    main()
