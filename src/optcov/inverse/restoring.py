"""Restore images from linear measurements y = A x_0 + noise. A diffusion model is the prior."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from optcov.bundle import Bundle
from optcov.covariances import Covariance, find_covariance
from optcov.forward import ForwardProcess
from optcov.inverse.arguments import LARGEST, MOST, check_count, check_images, check_measurement, check_noise
from optcov.inverse.conditioning import StoppingRule
from optcov.inverse.guides import DPS, WAYS, ByPosterior, DiffPIR, Draws, Guide, PiGDM, UnitPrior
from optcov.inverse.operators import Operator
from optcov.inverse.restoration import Restoration
from optcov.methods import METHODS, Method
from optcov.noise import NoiseSource
from optcov.prediction import check_condition, take
from optcov.progress import track
from optcov.reverse import ReverseProcess
from optcov.schedule import check_number, check_whole
from optcov.trajectory import KINDS, Trajectory
from optcov.watch import FiniteWatch, not_finite

DEFAULT_METHOD = "NPR-DDPM"
BASELINES = ("DPS", "PiGDM", "DiffPIR")


def restore(
    bundle: Bundle | ReverseProcess,
    measurement: Tensor,
    operator: Operator,
    noise_std: float,
    *,
    steps: int = 50,
    method: str | None = None,
    samples: int = 16,
    seed: int = 0,
    condition: Mapping[str, Tensor] | None = None,
    way: str | None = None,
    strength: float | None = None,
    trajectory: str | Trajectory = "even",
    batch_size: int = 64,
    tolerance: float = 1e-4,
    iterations: int = 500,
    progress: bool = True,
) -> Restoration:
    """Draw samples of x_0 given a measurement (*M), or given each of several (B, *M).

    bundle: a Bundle, or a ReverseProcess. The covariance of a ReverseProcess is used unless you name a method.
    noise_std: the standard deviation of the measurement's noise; 0 is allowed.
    method: a row of METHODS or a covariance, such as "NPR-DDPM", "SN-DDIM" or "npr_full". "isotropic" uses PiGDM's
    guess of the covariance. "DPS", "PiGDM" and "DiffPIR" are baselines.
    way: "proximal" multiplies by the covariance. "guidance" also takes one gradient through the network at each step,
    at about twice the cost. The default is guidance, but proximal for a full matrix, because there the gradient adds
    nothing.
    strength: the tuning parameter of DPS and DiffPIR.
    condition: further inputs of the network by name, each a tensor with one entry per measurement.
    batch_size: how many samples are drawn at once. It limits memory and does not change the samples: sample j of
    measurement b depends on (seed, b, j) alone.
    tolerance, iterations: of conjugate gradients, where they are needed.

    >>> import optcov, torch
    >>> from optcov.inverse import Mask, restore
    >>> mask = Mask.box((1, 28, 28), 8, 8, 12, 12)
    >>> found = restore(optcov.load("fashion"), mask.apply(torch.zeros(1, 1, 28, 28))[0], mask, 0.1, steps=3, samples=2)
    >>> found.samples.shape, found.std.shape
    (torch.Size([2, 1, 28, 28]), torch.Size([1, 28, 28]))
    """
    noise_std = check_noise(noise_std)
    batch, single = check_measurement(measurement, operator, noise_std)
    numbers = {"samples": samples, "steps": steps, "batch_size": batch_size}
    samples, steps, batch_size = (check_whole(name, value, 1) for name, value in numbers.items())
    if steps < 2 and isinstance(trajectory, str):
        raise ValueError("steps = 1 has no step from noise to noise; take at least 2, better 50")
    check_count(samples, len(batch))
    if isinstance(bundle, Bundle):
        check_images(operator, bundle)
        condition, batch = bundle.check_told(condition, len(batch)), batch.to(bundle.device)
    else:
        condition = check_condition(condition, len(batch))
    guide, title = make_guide(bundle, operator, noise_std, method, way, strength, StoppingRule(tolerance, iterations))
    times = _times(trajectory, guide.process, steps)
    pairs = [(b, j) for b in range(len(batch)) for j in range(samples)]
    chunks = [pairs[first : first + batch_size] for first in range(0, len(pairs), batch_size)]
    drawn: list[Tensor] = []
    work = _all_steps(guide, batch, chunks, times, seed, condition, drawn)
    for _ in track(work, len(chunks) * len(times), f"restoring by {title}", show=progress):
        pass
    if guide.unsolved:
        warnings.warn(
            f"conjugate gradients did not reach the tolerance {tolerance:g} in {iterations} iterations for "
            f"{guide.unsolved / guide.solved:.1%} of the systems; allow more iterations or a larger tolerance",
            RuntimeWarning,
            stacklevel=2,
        )
    found = torch.cat(drawn).reshape(len(batch), samples, *operator.shape)
    residual = residual_of(operator, found, batch.to(found))
    measured = batch.cpu()
    return Restoration(
        samples=found[0] if single else found,
        measurement=measured[0] if single else measured,
        residual=residual[0] if single else residual,
        evaluations=len(times),
        gradients=len(times) * guide.passes,
        unsolved=guide.unsolved / max(guide.solved, 1),
        operator=operator,
        noise_std=noise_std,
        method=title,
        data_range=guide.process.data_range,
    )


def make_guide(
    prior: Bundle | ReverseProcess,
    operator: Operator,
    noise_std: float,
    method: str | None,
    way: str | None,
    strength: float | None,
    stopping: StoppingRule,
) -> tuple[Guide, str]:
    """Return the guide of this method, and its title."""
    if way is not None and way not in WAYS:
        raise ValueError(f"way = {way!r} is not one of {', '.join(WAYS)}")
    baseline = next((known for known in BASELINES if known.lower() == str(method).strip().lower()), None)
    if baseline in (None, "PiGDM") and strength is not None:
        raise ValueError(f"strength = {strength} is for DPS and DiffPIR only; other methods have nothing to tune")
    if baseline is not None and way is not None:
        raise ValueError(f"way = {way!r} is for methods with a covariance; {baseline} has its own: leave it out")
    if baseline == "PiGDM":
        return PiGDM(_process(prior, "beta_tilde", 1.0), operator, noise_std, stopping), baseline
    if baseline is not None:
        kind = DPS if baseline == "DPS" else DiffPIR
        scale = kind.strength if strength is None else check_number("strength", strength)
        if not 0 < scale <= LARGEST:
            raise ValueError(
                f"strength = {strength} is not above 0, up to {LARGEST:g}; the default is {kind.strength:g}"
            )
        title = f"{baseline}, strength {scale:g}"
        return kind(_process(prior, "beta_tilde", 1.0), operator, noise_std, stopping, scale), title
    process, name = _named_process(prior, method)
    if not process.covariance.has_posterior or process.covariance.name == "beta_tilde":
        raise ValueError(
            f"{name} takes x_0 to be known given x_t, or says nothing of it, so that no measurement can move it; "
            f"choose a method with a covariance, such as {DEFAULT_METHOD}"
        )
    chosen = way or ("proximal" if process.covariance.structure == "matrix" else "guidance")
    return ByPosterior(process, operator, noise_std, stopping, chosen), f"{name}, {chosen}"


def _named_process(prior: Bundle | ReverseProcess, method: str | None) -> tuple[ReverseProcess, str]:
    if method is None and isinstance(prior, ReverseProcess):
        return prior, prior.covariance.name
    name = DEFAULT_METHOD if method is None else method
    if not isinstance(name, str):
        raise ValueError(f"method = {name!r:.80} is not a name; pass one such as {DEFAULT_METHOD!r}")
    if name.strip().lower() == "isotropic":
        return _process(prior, UnitPrior(), 1.0), "isotropic"
    row = next((row for known, row in METHODS.items() if known.lower() == name.strip().lower()), None)
    if row is None and name.strip().lower() not in Covariance.registry:
        raise ValueError(
            f"unknown method {name[:80]!r}; choose {DEFAULT_METHOD}, another row of METHODS or covariance, isotropic, "
            f"or a baseline: {', '.join(BASELINES)}"
        )
    if row is None:
        return _process(prior, name.strip().lower(), 1.0), name
    if row.covariance is None or row.eta is None:
        raise ValueError(f"{row.name} is a solver without a covariance; choose a method such as {DEFAULT_METHOD}")
    return _process(prior, row.covariance, row.eta), row.name


def _process(prior: Bundle | ReverseProcess, covariance: str | Covariance, eta: float) -> ReverseProcess:
    if isinstance(prior, Bundle):
        name = covariance if isinstance(covariance, str) else covariance.name
        options: dict[str, Any] = {} if isinstance(covariance, str) else {"covariance": covariance}
        row = Method(f"restoration by {name}", continuous=False, eta=eta, covariance=name)
        return prior.reverse_process(row, all_heads=False, **options)
    if not isinstance(prior, ReverseProcess):
        raise ValueError(f"bundle is a {type(prior).__name__}; pass a bundle, or a ReverseProcess")
    if covariance == prior.covariance.name:
        covariance = prior.covariance
    elif isinstance(covariance, str) and find_covariance(covariance).number is not None:
        raise ValueError(f"covariance {covariance!r} needs numbers per time; pass a ReverseProcess that has them")
    forward = ForwardProcess(prior.forward.schedule, eta)
    return ReverseProcess(prior.given_network, forward, covariance, prior.data_range, clip_mean=prior.bounds.clip_mean)


def _times(trajectory: str | Trajectory, process: ReverseProcess, steps: int) -> Trajectory:
    if isinstance(trajectory, Trajectory):
        return trajectory
    if not isinstance(trajectory, str) or trajectory not in KINDS:
        raise ValueError(f"trajectory = {trajectory!r:.80} is not one of {', '.join(KINDS)}, nor a Trajectory")
    return KINDS[trajectory](process.forward.schedule, int(steps))


def _all_steps(
    guide: Guide,
    batch: Tensor,
    chunks: list[list[tuple[int, int]]],
    times: Trajectory,
    seed: int,
    condition: Mapping[str, Tensor],
    drawn: list[Tensor],
) -> Iterator[float]:
    """Take every step of every chunk of samples, and put what they end at into `drawn`."""
    process = guide.process
    bounds = process.data_range
    for chunk in chunks:
        index = torch.tensor([b for b, _ in chunk])
        y = batch[index.to(batch.device)]
        numbers = [b * MOST + j for b, j in chunk]
        guide.process = process.for_images(seed, numbers)
        shared: dict[str, Any] = {"dtype": y.dtype, "device": y.device}
        images = NoiseSource((len(chunk), *guide.operator.shape), seed, numbers, **shared)
        measurements = NoiseSource(tuple(y.shape), seed, numbers, **shared)
        given = {name: value.to(y.device) for name, value in take(condition, index).items()}
        x = images.drawn(0) * guide.process.forward.schedule.unit_data_std(times.times[-1])
        watch = FiniteWatch(x)
        with torch.no_grad():
            for number, (t, s) in enumerate(times.descending(), start=1):
                x = guide.step(x, y, t, s, Draws(images, measurements, number), given)
                watch.note_bad(not_finite(x), t)
                yield t
        watch.require_finite()
        drawn.append((x if bounds is None else x.clamp(*bounds)).cpu())


def residual_of(operator: Operator, samples: Tensor, y: Tensor) -> Tensor:
    """Root mean square of y - A x over what is measured, (B, S)."""
    seen = operator.seen.to(samples)
    left = y.unsqueeze(1) - operator.apply(samples.flatten(0, 1)).reshape(*samples.shape[:2], *y.shape[1:])
    return torch.sqrt((seen * left).flatten(2).square().sum(-1) / seen.sum())
