"""One run of a network before the work begins, so that what it cannot compute is said at once, and by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optcov.bundle import Bundle
from optcov.checkpoints.opening import Function
from optcov.fitting.batches import Conditioned
from optcov.fitting.conditions import Part
from optcov.fitting.config import TrainingError
from optcov.networks import BackboneOutput
from optcov.networks.unet_config import brief
from optcov.prediction import condition_of

# what a user's own modules raise on arguments that they do not take
CALLING_ERRORS = (RuntimeError, TypeError, AttributeError, IndexError, KeyError, AssertionError)


def try_network(bundle: Bundle, part: Part) -> tuple[Tensor, BackboneOutput]:
    """Run the network on the first data point, and return that, (1, *D), and what the network gives."""
    _require_finite(part)
    first, module = torch.arange(1), bundle.unet
    x_0 = part.x_0(first)
    device = next(module.parameters(), x_0).device
    x_0, told = x_0.to(device), {name: value.to(device) for name, value in condition_of(part, first).items()}
    try:
        with torch.no_grad():
            output: BackboneOutput = bundle.network.features(x_0, bundle.network.native_schedule.final_time, **told)
    except torch.OutOfMemoryError:
        raise
    except CALLING_ERRORS as error:
        kind = bundle.name if isinstance(module, Function) else type(module).__name__
        known = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in told.items())
        given = f"the condition {known} of a data point" if known else "no condition"
        raise TrainingError(
            f"{kind} cannot be called with data of shape {tuple(x_0.shape[1:])} and {given} "
            f"({type(error).__name__}: {brief(error)}); give what it was trained on"
        ) from error
    if not bool(output.output.isfinite().all()):
        _name_the_cause(module)
    return x_0, output


def _require_finite(part: Part) -> None:
    known = part.known if isinstance(part, Conditioned) else {}
    for name, value in known.items():
        if not bool(value.isfinite().all()):
            raise TrainingError(f"the condition {name!r} holds NaN or infinity; clean it first")


def _name_the_cause(module: nn.Module) -> None:
    kind = type(module).__name__
    for name, weight in module.state_dict().items():
        if not bool(weight.isfinite().all()):
            raise TrainingError(f"{name} of {kind} holds NaN or infinite numbers; load it again, or train it anew")
    raise TrainingError(
        f"{kind} returns NaN or infinity at the last time; check the scale of its input, and its precision"
    )
