"""Work on a device other than the CPU: everything that meets on it must have been brought there.

No accelerator is at hand, so the device is torch's "meta", which has shapes but no numbers. Mixing it with the CPU
fails as mixing a GPU with the CPU does, and so does a number that is read where it lies; what is copied to the CPU
on purpose arrives as ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optcov import ForwardProcess, ReverseProcess, Schedule, Trajectory, sample
from optcov.data import ImageSet
from optcov.fitting import Batches, calibrate, fit_closed_form, measure, new_heads, time_grid
from optcov.networks import Backbone, HeadedNetwork
from small_bundles import small_unet

META = torch.device("meta")


@pytest.fixture(autouse=True)
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate finds the device; a copy to the CPU is allowed."""
    copy: Callable[[Tensor], Tensor] = Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else copy(tensor)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr("accelerate.Accelerator.device", META)
    # two checks of numbers, which there are none of
    monkeypatch.setattr("optcov.watch.FiniteWatch.require_finite", lambda watch: None)
    monkeypatch.setattr("optcov.fitting.stage2.fingerprint", lambda module: "")


def images(count: int = 40) -> ImageSet:
    pixels = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(pixels, None, "random")


def network(parameterisation: str = "epsilon") -> HeadedNetwork:
    backbone = Backbone.of(small_unet())
    return HeadedNetwork(backbone, Schedule.linear(24), parameterisation=parameterisation).eval().requires_grad_(False)


@pytest.mark.parametrize("parameterisation", ["epsilon", "v_prediction"])
def test_heads_are_fitted_measured_and_calibrated_where_the_network_is(parameterisation: str, tmp_path: Path) -> None:
    plain = network(parameterisation)
    tasks = new_heads(plain, images().x_0(torch.arange(1)), ["sn", "npr", "range"])
    fit = fit_closed_form(plain, tasks, Batches(images(), plain.schedule, 8, 0, True), 16)
    assert {parameter.device for head in fit.heads.values() for parameter in head.parameters()} == {META}
    headed = HeadedNetwork(plain.backbone, plain.schedule, fit.heads, parameterisation=parameterisation).eval()
    records = list(measure(headed, images(), time_grid(plain.native_schedule, 3), 8, 4, 0, tmp_path))
    assert len(records) == 3
    calibrate(headed, images(), ["npr"], 64)["npr"]


@pytest.mark.parametrize("covariance", ["beta", "sn", "npr", "range"])
def test_samples_are_drawn_where_the_network_is(covariance: str) -> None:
    plain = network()
    tasks = new_heads(plain, images().x_0(torch.arange(1)), ["sn", "npr", "range"])
    heads = {name: task.module for name, task in tasks.items()}
    headed = HeadedNetwork(plain.backbone, plain.schedule, heads).eval().to(META)
    process = ReverseProcess(headed, ForwardProcess(plain.schedule), covariance)
    x_0 = sample(process, Trajectory.even(plain.schedule, 3), shape=(2, 1, 8, 8), device=META)
    assert x_0.device == META
