"""What `restore` is given, checked at the border: each refusal names the value and says what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from optcov.bundle import Bundle
from optcov.inverse.checks import RANGE_TOLERANCE, check_adjoint, check_shape, is_plain, kind_of
from optcov.inverse.operators import Operator
from optcov.schedule import check_number

LARGEST = 1e6  # of a measurement, its noise and a strength: beyond, squares leave the range of float32
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of a measurement
MOST = 2**16  # samples of a measurement, and measurements: beyond, their noise would repeat


def check_noise(noise_std: float) -> float:
    """A standard deviation of noise, or a ValueError."""
    value = check_number("noise_std", noise_std)
    if not 0 <= value <= LARGEST:
        raise ValueError(
            f"noise_std = {value} is not a standard deviation from 0 to {LARGEST:g}; pass one such as 0.05"
        )
    return value


def check_count(samples: int, measurements: int = 1) -> None:
    """Refuse more samples or measurements than there is noise for."""
    if samples > MOST or measurements > MOST:
        raise ValueError(f"{samples} samples of {measurements} measurements are too many; at most {MOST} of each")


def check_images(operator: Operator, bundle: Bundle) -> None:
    """Refuse an operator for images that the bundle does not draw."""
    if tuple(operator.shape) != tuple(bundle.image_shape):
        raise ValueError(
            f"{operator.name} is for images of shape {operator.shape}, but {bundle.name} draws "
            f"{tuple(bundle.image_shape)}; make the operator for that shape"
        )


def check_measurement(measurement: Tensor, operator: Operator, noise_std: float) -> tuple[Tensor, bool]:
    """The measurements as a batch (B, *M), and whether there was one without a batch axis."""
    if not isinstance(operator, Operator):
        raise ValueError(
            f"operator is a {type(operator).__name__}; pass one of optcov.inverse, or Linear(apply, adjoint, shape)"
        )
    if not is_plain(measurement) or measurement.dtype not in PRECISIONS:
        told = ", ".join(str(dtype).removeprefix("torch.") for dtype in PRECISIONS)
        raise ValueError(f"the measurement is {kind_of(measurement)}; pass a dense tensor of {told}")
    for side in ("shape", "measurement_shape"):
        check_shape(getattr(operator, side, ()), f"the operator's {side}")
    wanted = tuple(operator.measurement_shape)
    single = tuple(measurement.shape) == wanted
    if not single and (tuple(measurement.shape[1:]) != wanted or not len(measurement)):
        raise ValueError(
            f"the measurement has shape {tuple(measurement.shape)}, but {operator.name} of images {operator.shape} "
            f"gives {wanted}; pass that, or (B, *{wanted})"
        )
    batch = measurement.detach().to(torch.promote_types(measurement.dtype, torch.float32))
    check_adjoint(operator, batch.dtype)
    batch = batch.unsqueeze(0) if single else batch
    seen = operator.seen.to(batch)
    batch = torch.where(batch.isfinite() | (seen > 0), batch, 0.0)  # NaN often marks what is hidden
    if not bool(batch.isfinite().all()):
        raise ValueError("the measurement holds NaN or infinite values; hide what is missing by a Mask instead")
    if float(batch.abs().max()) > LARGEST:
        raise ValueError(
            f"the measurement has values beyond {LARGEST:g}; scale it as the model's data, such as [-1, 1]"
        )
    if noise_std == 0 and float((gap := operator.outside_range(batch)).max()) > RANGE_TOLERANCE:
        raise ValueError(
            f"without noise no image gives this measurement: it is {float(gap.max()):.2g} of its size away from all "
            f"that {operator.name} can give; pass the noise's standard deviation, or a measurement without noise"
        )
    return batch * seen, single
