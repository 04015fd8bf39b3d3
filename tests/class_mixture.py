"""Data of two classes with every moment in closed form, and a perfect network of it with features for heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optcov import Schedule, oracle
from optcov.networks import Backbone, HeadedNetwork, TimeArgument

MIXTURE = oracle.GaussianMixture(
    [0.4, 0.3, 0.3],
    [[-1.0, 0.3], [0.5, 0.2], [1.0, -0.6]],
    [[[0.3, 0.1], [0.1, 0.2]], [[0.1, 0.0], [0.0, 0.4]], [[0.05, 0.02], [0.02, 0.1]]],
    labels=[0, 1, 1],
)
SIMPLE = oracle.GaussianMixture([0.5, 0.5], [[-0.5, 0.2], [0.4, 0.1]], [0.02, 0.6], labels=[0, 1])


class Labelled:
    """Points with labels, as a source of data."""

    def __init__(self, data: oracle.GaussianMixture, count: int, seed: int = 0):
        points, self.labels = data.sample_labelled(count, seed)
        self.points = points.float()

    def __len__(self) -> int:
        return len(self.points)

    def x_0(self, index: Tensor) -> Tensor:
        return self.points[index]


class ExactBackbone(nn.Module):
    """The perfect noise prediction given the class; features that tell class and noise level."""

    def __init__(self, data: oracle.GaussianMixture, schedule: Schedule):
        super().__init__()
        self.data, self.schedule, self.out = data, schedule, nn.Identity()
        self.anchor = nn.Parameter(torch.zeros(1))  # a module on some device
        self.calls = 0

    def forward(self, x: Tensor, time: Tensor, class_labels: Tensor) -> Tensor:
        self.calls += 1
        level = self.schedule.log_snr(time.double()).float()
        waves = torch.stack([torch.sin(level * rate + shift) for rate in (0.1, 0.2, 0.4) for shift in (0, 1.5)], 1)
        kind = nn.functional.one_hot(class_labels, self.data.classes + 1)
        self.out((kind[:, :, None] * torch.cat([waves, torch.ones_like(waves[:, :1])], 1)[:, None]).flatten(1).float())
        return self.data.noise_moments(x, self.schedule, time.double(), class_labels).mean.float()


def exact_network(data: oracle.GaussianMixture, schedule: Schedule) -> HeadedNetwork:
    backbone = Backbone(ExactBackbone(data, schedule), tap="out")
    return HeadedNetwork(backbone, schedule, time_argument=TimeArgument(1.0)).eval()
