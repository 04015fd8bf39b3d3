"""What OCM's head is fitted on: the trace of the network's Jacobian as a variance, beside the squared error.

    python benchmarks/ocm_trace.py BUNDLE DATA [--images 64] [--probes 4] [--record FILE]

Test images, given their class. Each line is a time: (b^2 / a) trace(d x0_hat / d x_t) / d by random signs, which is the
mean variance of x_0 if the network is perfect, and the mean squared error of x0_hat.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import optcov
from optcov import ForwardProcess, data
from optcov.noise import batch_noise
from optcov.prediction import Prediction

TIMES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    model, test = optcov.load(options.bundle), data.load(options.data, "test")
    numbers = range(options.images)
    x_0, labels = test.x_0()[: len(numbers)], torch.as_tensor(test.labels)[: len(numbers)].long()
    forward, network = ForwardProcess(model.schedule), model.network.with_only_heads()
    lines = []
    for place, t in enumerate(TIMES):
        x_t = forward.diffuse(x_0, t, batch_noise(0, numbers, place, x_0.shape[1:])).requires_grad_()
        signal, spread = forward.levels(t)
        clean = Prediction.of(network(x_t, t, class_labels=labels), x_t, t, signal, spread).clean
        signs = torch.Generator().manual_seed(place)
        found = torch.zeros(len(numbers))
        for _ in range(options.probes):
            z = torch.randint(0, 2, x_0.shape, generator=signs).to(x_0) * 2 - 1
            (product,) = torch.autograd.grad(clean, x_t, z, retain_graph=True)
            found += (z * product).flatten(1).mean(1) / options.probes
        variance = found * float(spread**2 / signal)
        error = (clean.detach() - x_0).square().flatten(1).mean(1)
        line = {
            "bundle": model.name,
            "model": model.digest()[:12],
            "t": t,
            "images": len(numbers),
            "squared error": round(float(error.mean()), 5),
        }
        line["trace"] = [round(float(variance.mean()), 5), round(float(variance.std() / len(numbers) ** 0.5), 5)]
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
    if options.record:
        options.record.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
