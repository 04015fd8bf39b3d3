"""Losses per sample, (B,), summed over pixels.

noise      |eps - eps_hat|^2                                       Eq. 7
sn         |eps^2 - h|^2                                           Eq. 9, Algorithm 1
npr        |(eps - eps_hat)^2 - g|^2                               Eq. 15, Algorithm 2
gamma      sum (y / g + log g), y the target of either head; its minimiser is E[y | x_t] too
range      KL(q(x_s | x_t, x_0) || p(x_s | x_t)) with the mean detached, s the time before t (Improved DDPM)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optcov.gaussian import sum_pixels


def noise_loss(noise: Tensor, predicted: Tensor) -> Tensor:
    """Squared error of the predicted noise."""
    return sum_pixels((noise - predicted).square())


def sn_target(noise: Tensor, predicted: Tensor) -> Tensor:
    """What an SN head regresses on: eps^2."""
    return noise.square()


def npr_target(noise: Tensor, predicted: Tensor) -> Tensor:
    """What an NPR head regresses on: (eps - eps_hat)^2."""
    return (noise - predicted).square()


def squared_error(target: Tensor, estimate: Tensor) -> Tensor:
    """The paper's loss of a head."""
    return sum_pixels((target - estimate).square())


def gamma_deviance(target: Tensor, estimate: Tensor) -> Tensor:
    """y / g + log g: the negative log-likelihood of a Gaussian's squared residual, up to constants and a factor of 2."""
    return sum_pixels(target / estimate + torch.log(estimate))


TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sn": sn_target, "npr": npr_target}
