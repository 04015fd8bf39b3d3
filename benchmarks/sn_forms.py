"""Forms of SN side by side: the paper's linear head, whose difference is clamped, and the positive one in two units.

    python benchmarks/sn_forms.py [BUNDLE] [--data DATA] [--images 1024] [--record FILE]

All are fitted in closed form on the same training images and looked at on the same held-out ones. Each line is a time:
the share of pixels whose variance was negative and set to 0, and the mean of the variance, after that, over the mean
squared residual that it stands for (1 is right). Of the positive ones also the cost in nats per dimension of the step
to time s = 0.8 t: lower is better. In noise units the origin of the squares is eps = 0, in velocity units u = 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from optcov import ForwardProcess, ReverseProcess, bundle, data
from optcov.fitting import Batches, fit_closed_form, new_heads
from optcov.networks import HeadedNetwork
from optcov.noise import batch_noise

TIMES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEP = 0.8  # s / t of the step whose cost is compared
FORMS = {"linear": ("mse", None), "positive": ("gamma", None), "positive, noise units": ("gamma", "noise")}


def fitted(network: HeadedNetwork, images: data.ImageSet, count: int, loss: str, unit: str | None) -> HeadedNetwork:
    """The network with a new SN head: loss "mse" is the paper's form, "gamma" the positive one; None: its own unit."""
    tasks = new_heads(network, images.x_0(torch.arange(1)), ["sn"], loss=loss)
    tasks["sn"].module.unit = unit or tasks["sn"].module.unit
    done = fit_closed_form(network, tasks, Batches(images, network.schedule, 64), count, loss)
    return HeadedNetwork(
        network.backbone, network.schedule, done.heads, network.time_argument, network.parameterisation
    ).eval()


@torch.no_grad()
def looked_at(
    network: HeadedNetwork, x_0: torch.Tensor, condition: dict[str, torch.Tensor], t: float, stream: int
) -> dict[str, float]:
    """Share of variances below 0, mean variance of x_0 over the mean square of x_0 - x0_hat, and the cost of a step."""
    process = ReverseProcess(network, ForwardProcess(network.schedule), "sn", data_range=None)
    x_t = process.forward.diffuse(x_0, t, batch_noise(0, range(len(x_0)), stream, x_0.shape[1:]))
    posterior = process.posterior(x_t, t, **condition)
    squares = (x_0 - posterior.mean).square()
    bridge = process.forward.bridge(t, STEP * t)
    variance = bridge.variance + bridge.clean_weight**2 * posterior.variance.clamp(0, 1)
    ratio = bridge.variance / variance
    cost = (ratio - ratio.log() - 1 + bridge.clean_weight**2 * squares / variance) / 2
    below = process.bounds.below / process.bounds.total
    return {"below": below, "ratio": float(posterior.variance.mean() / squares.mean()), "cost": float(cost.mean())}


def main() -> None:
    """Print a line per time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?", default="fashion")
    parser.add_argument("--data", default="data/fashion-mnist", help="images whose training part heads are fitted on")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--held-out", type=int, default=96)
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    model = bundle.load(options.bundle)
    network = model.network.with_only_heads()
    train, test = (data.load(options.data, part) for part in ("train", "test"))
    forms = {name: fitted(network, train, options.images, *form) for name, form in FORMS.items()}
    held_out = torch.arange(options.held_out)
    x_0 = test.x_0(held_out)
    told = {"class_labels": torch.as_tensor(test.labels)[held_out].long()} if model.classes else {}
    lines = []
    for stream, t in enumerate(TIMES):
        found = {name: looked_at(form, x_0, told, t, stream) for name, form in forms.items()}
        lines.append(json.dumps({"bundle": model.name, "model": model.digest()[:12], "t": t, **found}))
        print(lines[-1], flush=True)
    if options.record:
        options.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
