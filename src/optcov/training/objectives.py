"""Objectives: modules that turn a batch into a loss per sample, with the parameters to train."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from optcov.forward import ForwardProcess
from optcov.networks import HeadedNetwork
from optcov.training.batches import Batch
from optcov.training.losses import noise_loss


@final
class NoiseObjective(nn.Module):
    """Stage 1: the mean squared error of the predicted noise (Eq. 7), averaged over pixels."""

    def __init__(self, network: HeadedNetwork):
        super().__init__()
        self.network = network
        self.forward_process = ForwardProcess(network.schedule)

    def forward(self, batch: Batch) -> Tensor:
        """Loss per sample, (B,)."""
        x_t = self.forward_process.diffuse(batch.x_0, batch.times, batch.noise)
        output = self.network.features(x_t, batch.times)
        predicted = self.network.noise_from(output, x_t, batch.times)
        return noise_loss(batch.noise, predicted) / batch.noise[0].numel()
