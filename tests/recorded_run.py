"""A run of `generate` that records the noise it draws, for tests that need several processes."""

from __future__ import annotations

import hashlib
from unittest import mock

import torch
from torch import Tensor

from optcov import ForwardProcess, NoisePrediction, ReverseProcess, Schedule, Trajectory, generate
from optcov import noise as noises


def network(x_t: Tensor, t: float) -> NoisePrediction:
    return NoisePrediction(torch.tanh(x_t) * 0.9, {"npr": 0.1 + 0.1 * torch.sigmoid(x_t)})


def run(images: list[int], batch_size: int) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Hashes of the noise by "image stream", and pixels by image."""
    noise: dict[str, str] = {}
    pixels: dict[str, list[float]] = {}
    draw = noises.batch_noise

    def recorded(seed, indices, stream, *shape):
        values = draw(seed, indices, stream, *shape)
        for image, value in zip(indices, values, strict=True):
            noise[f"{image} {stream}"] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        return values

    schedule = Schedule.linear()
    process = ReverseProcess(network, ForwardProcess(schedule), "npr")
    with mock.patch.object(noises, "batch_noise", recorded):
        for batch in generate(process, Trajectory.even(schedule, 3), (1, 4, 4), images, batch_size, seed=5):
            pixels.update(zip(map(str, batch.indices), batch.images.flatten(1).tolist(), strict=True))
    return noise, pixels
