"""Draw from a reverse process along a trajectory: x_s ~ p(x_s | x_t), from the last time down to 0.

Two details follow the paper (Appendix F), and both are arguments. The last step returns its mean. The step that lands
on tau_1 has its standard deviation capped, so that it moves a pixel by at most y 8-bit levels on average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from optcov.gaussian import Gaussian
from optcov.noise import NoiseSource, StepNoise, image_numbers
from optcov.prediction import check_condition
from optcov.reverse import ReverseProcess, Step
from optcov.schedule import check_whole, is_whole
from optcov.trajectory import Trajectory
from optcov.watch import FiniteWatch, not_finite

LAST_STEPS = ("mean", "draw")


@final
@dataclass(frozen=True)
class Batch:
    """Some of the images of a run."""

    images: Tensor  # x_0, (B, *D)
    indices: tuple[int, ...]  # the number of each image in the run, which with the seed determines its noise


def sample(
    process: ReverseProcess,
    trajectory: Trajectory,
    shape: Sequence[int] | None = None,
    seed: int = 0,
    start: Tensor | None = None,
    noise: StepNoise | None = None,
    noise_cap: float | None = None,
    last_step: str = "mean",
    *,
    condition: Mapping[str, Tensor] | None = None,
    indices: Sequence[int] | None = None,
    callback: Callable[[Step], None] | None = None,
    differentiable: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw x_0 of the given shape (B, *D).

    start: x at the last time; by default it is drawn.
    noise: a callable (t, s) -> (B, *D); by default the noise is drawn.
    condition: further inputs of the network by name, each a tensor with one entry per image.
    indices: the number of each image, (B,). The noise of an image depends on its number and the seed, not on the batch.
    noise_cap: the paper's y, in 8-bit levels; None for no cap.
    last_step: "mean" returns the mean of the last step, "draw" draws from it.
    differentiable: keep the graph, for gradients through the sampler.

    >>> from optcov import ForwardProcess, Schedule, oracle
    >>> schedule = Schedule.linear()
    >>> data = oracle.GaussianMixture([1.0], [[0.0, 0.0]], [0.25])
    >>> process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "sn", data_range=None)
    >>> sample(process, Trajectory.even(schedule, 10), shape=(4, 2)).shape
    torch.Size([4, 2])
    """
    if last_step not in LAST_STEPS:
        raise ValueError(f"last_step = {last_step!r} is not one of {', '.join(LAST_STEPS)}")
    _check_parts(process, trajectory, noise)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype = {dtype} has no normal noise; use a floating-point type such as torch.float32")
    cap = variance_cap(process, noise_cap)
    shape = _check_shape(shape, start)
    if start is not None:
        dtype, device = start.dtype, start.device
    source = NoiseSource(shape, seed, indices, noise, dtype, check_device(device))
    condition = check_condition(condition, shape[0])
    process = process.for_images(seed, image_numbers(indices, shape[0]))
    for t in trajectory.times:
        process.forward.schedule.check_times(t)
    x = start
    if x is None:
        x = source.drawn(0) * process.forward.schedule.unit_data_std(trajectory.times[-1])
    watch = FiniteWatch(x)
    with nullcontext() if differentiable else torch.no_grad():
        for number, (t, s) in enumerate(trajectory.descending(), start=1):
            prediction = process.predict(x, t, **condition)
            step = process.step_from(prediction, s)
            if s == trajectory.times[0]:
                step = capped(step, cap)
            shows_mean = s == 0 and last_step == "mean"
            x_s = step.mean if shows_mean else step.sample(source.draw(number, t, s))
            # both: a clipped x0_hat hides an infinite prediction, and finite ones can overflow
            watch.note_bad(prediction.bad_samples() | not_finite(x_s), t)
            if callback is not None:
                callback(Step(t, s, x, step, x_s))
            x = x_s
    watch.require_finite()
    return x


def generate(
    process: ReverseProcess,
    trajectory: Trajectory,
    image_shape: Sequence[int],
    images: int | Sequence[int],
    batch_size: int = 64,
    seed: int = 0,
    *,
    condition: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Iterator[Batch]:
    """Draw many images batch by batch.

    images: how many to draw, or the numbers of the images to draw. With numbers, an interrupted run can draw what is
    missing, and several processes can share the work: image i is always the same.
    condition: further inputs of the network by name, with one entry for each image to draw.
    options: those of `sample`, such as noise_cap.
    """
    wanted = range(check_whole("images", images, 0)) if isinstance(images, int | Real) else images
    batch_size = check_whole("batch_size", batch_size, 1)
    condition = check_condition(condition, len(wanted))
    for first in range(0, len(wanted), batch_size):
        indices = tuple(wanted[first : first + batch_size])
        drawn = sample(
            process,
            trajectory,
            (len(indices), *image_shape),
            seed,
            condition={name: value[first : first + batch_size] for name, value in condition.items()},
            indices=indices,
            **options,
        )
        yield Batch(drawn, indices)


def variance_cap(process: ReverseProcess, noise_cap: float | None) -> float | None:
    """The largest variance of the step that lands on tau_1: (y (b - a)/255 sqrt(pi/2))^2, since E|eps| = sqrt(2/pi)."""
    if noise_cap is None:
        return None
    if process.data_range is None:
        raise ValueError(
            f"noise_cap = {noise_cap} counts 8-bit levels and needs a data_range; pass data_range to the process, or "
            f"noise_cap=None"
        )
    if not isinstance(noise_cap, Real) or not 0 < noise_cap <= 255:
        raise ValueError(f"noise_cap = {noise_cap!r} must be a positive number of 8-bit levels, at most 255, or None")
    low, high = process.data_range
    return (noise_cap * (high - low) / 255 * math.sqrt(math.pi / 2)) ** 2


def capped(step: Gaussian, cap: float | None) -> Gaussian:
    """Limit the variances of a step to the cap, if there is one."""
    return step if cap is None else Gaussian(step.mean, step.covariance.clamped(cap)[0])


def check_device(device: torch.device | str) -> torch.device:
    """Return a device that can hold tensors, or raise a ValueError that names it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0][:120]
        raise ValueError(f"device = {str(device)!r} cannot be used here ({reason}); use cpu, or another one") from error


def _check_parts(process: object, trajectory: object, noise: object) -> None:
    if not isinstance(process, ReverseProcess):
        raise ValueError(f"process is a {type(process).__name__}; pass ReverseProcess(network, forward, covariance)")
    if not isinstance(trajectory, Trajectory):
        raise ValueError(f"trajectory = {trajectory!r:.80} is not a Trajectory; pass Trajectory(times)")
    if noise is not None and not callable(noise):
        raise ValueError(f"noise is a {type(noise).__name__}; pass a function (t, s) -> tensor, or None to draw it")


def _check_shape(shape: Sequence[int] | None, start: Tensor | None) -> tuple[int, ...]:
    if shape is None and start is None:
        raise ValueError("pass the shape (B, *D) of what to draw, or start, the tensor to start from")
    if start is not None and not isinstance(start, Tensor):
        raise ValueError(f"start is a {type(start).__name__}, not a torch tensor; convert it by torch.as_tensor")
    if start is not None and not start.is_floating_point():
        raise ValueError(f"start has {start.dtype}, not floating-point numbers; convert it by start.float()")
    if shape is not None and (
        isinstance(shape, str) or not isinstance(shape, Sequence) or not all(map(is_whole, shape))
    ):
        raise ValueError(f"shape = {shape!r:.80} is not (B, *D) in whole numbers; pass one such as (4, 3, 32, 32)")
    if start is not None and shape is not None and tuple(shape) != tuple(start.shape):
        raise ValueError(f"start has shape {tuple(start.shape)}, but shape is {tuple(shape)}; pass one of them")
    known = tuple(start.shape) if start is not None else tuple(shape or ())
    if len(known) < 2 or min(known) < 1:
        raise ValueError(f"shape = {known} is not (B, *D) with a batch and at least one data axis, all positive")
    return known
