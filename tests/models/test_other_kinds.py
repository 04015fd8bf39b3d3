"""Models and data that are a little unlike the usual ones: each is taken rightly, or refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optcov
from optcov import Schedule

QUICK: dict[str, Any] = {
    "images": 8, "measure_images": 2, "times": 3, "calibration_samples": 0, "progress": False, "batch_size": 4,
    "half": False,
}  # fmt: skip
OPTIONS = ["--images", 8, "--measure-images", 2, "--times", 3, "--calibration-samples", 0, "--batch-size", 4]


class Net(nn.Module):
    """A network of somebody's own that returns its prediction in some way."""

    def __init__(self, wrap: Any = lambda output: output) -> None:
        super().__init__()
        self.wrap, self.out, self.told = wrap, nn.Conv2d(1, 1, 3, padding=1), []

    def forward(self, x: Tensor, time: Tensor) -> Any:
        self.told.append(time)
        return self.wrap(self.out(x))


def points() -> Tensor:
    return torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize(
    "wrap",
    [lambda output: [output], lambda output: (output, 3), lambda output: {"sample": output}],
    ids=["list", "tuple", "dictionary"],
)
def test_a_network_may_return_its_prediction_as_the_first_of_several_or_as_sample(wrap: Any) -> None:
    bundle = optcov.fit((Net(wrap), Schedule.flow(), "flow_prediction"), points(), layer="out", **QUICK)
    assert bundle.sample(1, steps=2, progress=False).isfinite().all()


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [(lambda _: None, "NoneType"), (lambda output: {"eps": output}, "dict"), (lambda _: (3,), "int")],
    ids=["nothing", "another name", "a number"],
)
def test_what_is_no_prediction_is_named(wrap: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"Net returns a {kind}, in which no prediction is found; return a tensor"):
        optcov.fit((Net(wrap), Schedule.flow(), "flow_prediction"), points(), layer="out", **QUICK)


def test_a_network_that_fails_at_some_times_only_is_named() -> None:
    class Late(Net):
        def forward(self, x: Tensor, time: Tensor) -> Any:
            return torch.where(time[:, None, None, None] < 0.5, torch.nan, super().forward(x, time))

    with pytest.raises(ValueError, match="Late returns NaN, infinity or numbers beyond all bounds at some times"):
        optcov.fit((Late(), Schedule.flow(), "flow_prediction"), points(), layer="out", **QUICK)
