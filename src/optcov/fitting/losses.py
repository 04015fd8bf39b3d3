"""Losses per sample, (B,), summed over pixels, and what heads regress on.

    noise      |eps - eps_hat|^2                                       Eq. 7
    sn         |eps^2 - h|^2                                           Eq. 9, Algorithm 1
    npr        |(eps - eps_hat)^2 - g|^2                               Eq. 15, Algorithm 2
    gamma      sum (y / g + log g), y the target of either head

The minimiser of the last is E[y | x_t] too, but it weighs errors relative to g, as the bound on the likelihood does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optcov.gaussian import sum_pixels


def noise_loss(noise: Tensor, predicted: Tensor) -> Tensor:
    """Squared error of the predicted noise."""
    return sum_pixels((noise - predicted).square())


def squared_error(target: Tensor, estimate: Tensor) -> Tensor:
    """The paper's loss of a head."""
    return sum_pixels((target - estimate).square())


def gamma_deviance(target: Tensor, log_estimate: Tensor) -> Tensor:
    """y / g + log g by log g: -2 log-likelihood of a Gaussian residual with square y and variance g, to a constant."""
    return sum_pixels(target * torch.exp(-log_estimate) + log_estimate)
