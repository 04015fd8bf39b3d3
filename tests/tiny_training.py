"""A network of a few hundred weights, images for it, and a training of a few steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from optcov import Schedule
from optcov.data import ImageSet
from optcov.fitting import Batches, NoiseObjective, Training, TrainingConfig
from optcov.networks import Backbone, HeadedNetwork


class Net(nn.Module):
    """A network of a few hundred weights."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 8, 3, padding=1)
        self.time_embedding = nn.Linear(1, 8)
        self.conv_norm_out = nn.GroupNorm(4, 8)
        self.conv_out = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x, time):
        hidden = self.body(x) + self.time_embedding(time[:, None] / 1000)[..., None, None]
        return self.conv_out(torch.nn.functional.silu(self.conv_norm_out(hidden)))


def tiny_network(schedule=None) -> HeadedNetwork:
    torch.manual_seed(0)
    return HeadedNetwork(Backbone.of(Net()), schedule or Schedule.vp_sde())


def images(count: int = 40) -> ImageSet:
    generator = torch.Generator().manual_seed(2)
    return ImageSet(torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8))


def training(directory: Path, steps: int = 6, network=None, **options) -> Training:
    network = network or tiny_network()
    config = TrainingConfig(
        **{"steps": steps, "batch_size": 4, "learning_rate": 1e-2, "checkpoint_every": 2, **options}
    )
    return Training(NoiseObjective(network), Batches(images(), network.schedule, 4), config, directory)


def weights(network: HeadedNetwork) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
