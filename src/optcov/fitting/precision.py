"""Mixed precision as Accelerate was asked for it, and how a CPU computes in it without waste."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from optcov.fitting.config import TrainingError


def mixed_precision(accelerator: Accelerator) -> dict[str, str]:
    """The precision as a setting of the run; none for float32, as runs before it were recorded."""
    name = accelerator.mixed_precision
    if name == "no":
        return {}
    if name != "fp8" and not accelerator.native_amp:  # Accelerate would train in float32 without a word
        raise TrainingError(
            f"mixed precision {name!r} is not available on {accelerator.device.type}; choose bf16, or no for float32"
        )
    return {"mixed_precision": name}


@contextmanager
def quick_on_cpu(network: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """In mixed precision on a CPU, compute group norms in float32 and attention by matrix products meanwhile.

    The kernels that bfloat16 has for them there are three and six times slower. Norms whose own weights are in half
    precision stay as they are.
    """
    if accelerator.mixed_precision == "no" or accelerator.device.type != "cpu":
        yield
        return
    norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm) and _is_float32(m.weight)]
    hooks = [norm.register_forward_pre_hook(_in_float32) for norm in norms]
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_float32(weight: Tensor | None) -> bool:
    return weight is None or weight.dtype == torch.float32


def _in_float32(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (arguments[0].float(), *arguments[1:])
