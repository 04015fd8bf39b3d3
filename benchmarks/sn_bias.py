"""Why SN can lose to NPR in samples: its variance is a small difference of large numbers, clamped at 0.

    python benchmarks/sn_bias.py [BUNDLE] [--images 96]

In noise units SN's variance is v = h - eps_hat^2 (Eq. 10). An error of h that does not matter to its own loss moves v
below 0 in many pixels; clamping them leaves a mean of max(v, 0) far above the squared residual that v stands for. NPR
estimates the residual itself (Eq. 16) and has nothing to clamp. On the embedded model's held-out images by default.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from optcov import ForwardProcess, bundle
from optcov.networks import HeadedNetwork
from optcov.noise import batch_noise

TIMES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@torch.no_grad()
def bias_at(network: HeadedNetwork, x_0: Tensor, t: float, stream: int) -> tuple[float, ...]:
    """Mean squared residual; means of v, max(v, 0) and NPR's g relative to it; and the share of negative v."""
    eps = batch_noise(0, range(len(x_0)), stream, x_0.shape[1:])
    prediction = network(ForwardProcess(network.schedule).diffuse(x_0, t, eps), t)
    residual = (eps - prediction.noise).square().mean()
    v = prediction.head("sn") - prediction.noise.square()
    ratios = (estimate.mean() / residual for estimate in (v, v.clamp(min=0), prediction.head("npr")))
    return tuple(float(number) for number in (residual, *ratios, (v < 0).float().mean()))


def main() -> None:
    """Print a line per time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?", default="fashion", help="a bundle with the heads sn and npr")
    parser.add_argument("--images", type=int, default=96, help="held-out images of the embedded model")
    options = parser.parse_args()
    network = bundle.load(options.bundle).network
    x_0 = bundle.test_images("fashion")[: options.images]
    print("    t   residual      v / r  max(v,0) / r     g / r     v < 0")
    for stream, t in enumerate(TIMES):
        residual, plain, clamped, npr, negative = bias_at(network, x_0, t, stream)
        print(f"{t:5.2f}  {residual:9.5f}  {plain:9.2f}  {clamped:12.2f}  {npr:8.2f}  {negative:8.0%}")


if __name__ == "__main__":
    main()
