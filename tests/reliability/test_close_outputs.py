"""The tolerance for outputs of the same network lets rounding pass, and nothing else."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from close_outputs import assert_close_outputs, assert_close_results
from small_bundles import SHAPE, small_unet


def output(unet: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        found: torch.Tensor = unet(x, torch.tensor([1.0, 40.0, 300.0, 999.0])).sample
    return found


def test_another_order_of_the_sums_passes() -> None:
    unet = small_unet()
    expected = output(copy.deepcopy(unet).double(), torch.float64)
    assert_close_outputs(output(unet), expected)
    assert_close_outputs(output(unet.to(memory_format=torch.channels_last)), expected)  # type: ignore[call-overload]


def test_weights_rounded_to_half_precision_do_not_pass() -> None:
    unet = small_unet()
    with pytest.raises(AssertionError, match="differ by"):
        assert_close_outputs(output(copy.deepcopy(unet).half().float()), output(unet))


def test_a_lost_weight_and_an_output_that_is_no_number_do_not_pass() -> None:
    unet, damaged = small_unet(), small_unet()
    with torch.no_grad():
        damaged.get_parameter("conv_in.bias")[0] = 0
    for wrong in (output(damaged), output(unet) * float("nan"), output(unet)[:2]):
        with pytest.raises(AssertionError):
            assert_close_outputs(wrong, output(unet))


def test_results_are_near_in_their_numbers_and_equal_elsewhere() -> None:
    expected = {"name": "a", "K": 10, "rows": [{"bits": 3.25, "error": None}]}
    assert_close_results({"name": "a", "K": 10, "rows": [{"bits": 3.25001, "error": None}]}, expected)
    for wrong in (
        {"name": "b", "K": 10, "rows": [{"bits": 3.25, "error": None}]},
        {"name": "a", "K": 11, "rows": [{"bits": 3.25, "error": None}]},
        {"name": "a", "K": 10, "rows": [{"bits": 3.26, "error": None}]},
        {"name": "a", "K": 10, "rows": [{"bits": 3.25, "error": 0.1}]},
        {"name": "a", "K": 10, "rows": []},
        {"name": "a", "rows": [{"bits": 3.25, "error": None}]},
    ):
        with pytest.raises(AssertionError):
            assert_close_results(wrong, expected)


def test_the_other_cpu_of_the_makefile_has_no_vector_instructions_that_torch_would_use() -> None:
    """A name that torch does not know would be passed over without a word, and the second run test nothing new."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    settings = re.search(r"^OTHER_CPU := (.+)$", makefile, re.MULTILINE)
    assert settings
    other = dict(setting.split("=") for setting in settings[1].split())
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    shown = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **other}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "DEFAULT"
