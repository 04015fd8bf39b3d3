"""A sampler draws the images of a bundle by number, by any method."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.bundle.bundle import Bundle
from optcov.bundle.conditions import with_labels
from optcov.bundle.directory import check_path
from optcov.covariances import Covariance
from optcov.data.images import require_memory
from optcov.identity import condition_identity, remember
from optcov.methods import DEFAULT_METHOD, HEAD_METHOD, Method, draw, find_method
from optcov.networks.guidance import check_guidance
from optcov.noise import check_image_numbers
from optcov.prediction import check_condition, take
from optcov.progress import track
from optcov.reverse import ReverseProcess, Step
from optcov.schedule import check_number, check_whole, is_whole
from optcov.solvers import BridgeNoise, MultistepNoise, SolverResult, few_step_times
from optcov.storage import StorageError, directory_lock, read_tensors, write_tensors
from optcov.trajectory import Trajectory


@final
class Sampler:
    """A bundle, a method and its settings. Image number i is always the same, whatever else is drawn with it.

    trajectory: "even", "quadratic", "karras", "optimal" or a Trajectory, for methods with a covariance. Bridge 2M
    chooses its own times, but also takes a Trajectory. Other methods choose their own times.
    noise_cap: the paper's y, in 8-bit levels. None takes the bundle's value; 0 means no cap.
    tolerance: for Gotta Go Fast, which chooses its own steps.
    condition: further inputs of the network by name, each a tensor whose entry i belongs to image number i.
    guidance: the weight of classifier-free guidance; 1 means none.
    ocm_probes: for OCM-DDPM and OCM-DDIM, probe the Jacobian this many times at each step instead of using a fitted
    head.
    clip_mean, use_clipped_model_output: as in `ReverseProcess`. None clips as the paper does (docs/clipping.md).

    >>> from optcov import bundle
    >>> sampler = Sampler(bundle.load("fashion"), "SN-DDIM", 2)
    >>> sampler.draw(range(3)).x_0.shape
    torch.Size([3, 1, 28, 28])
    """

    def __init__(
        self,
        bundle: Bundle,
        method: str,
        steps: int,
        seed: int = 0,
        *,
        trajectory: str | Trajectory = "even",
        noise_cap: float | None = None,
        last_step: str = "mean",
        tolerance: float = 0.05,
        condition: Mapping[str, Tensor] | None = None,
        guidance: float = 1.0,
        ocm_probes: int | None = None,
        clip_mean: bool | None = None,
        use_clipped_model_output: bool | None = None,
    ):
        self.method: Method = find_method(method)
        self.bundle = model = at_times_of(bundle, self.method)
        self.steps = check_whole("steps", steps, 1)
        self.seed, self.last_step = seed, last_step
        self.tolerance = check_number("tolerance", tolerance)
        if not self.tolerance > 0:
            raise ValueError(f"tolerance = {tolerance} is not positive; the default is 0.05")
        self.clipping = _clipping(clip_mean, use_clipped_model_output)
        self.process: ReverseProcess | None = None
        self.trajectory: Trajectory | None = None
        self.step_noise: MultistepNoise | None = None
        if self.method.covariance is not None:
            options = {"ocm_probes": ocm_probes, "guidance": guidance, **self.clipping}
            self.process = model.reverse_process(self.method, all_heads=False, **options)
            self.trajectory = self._along(trajectory)
        else:
            own_times = self.method.solver == "bridge" and isinstance(trajectory, Trajectory)
            self._refuse_options_of_steps(
                ("even" if own_times else trajectory, noise_cap, last_step) != ("even", None, "mean"),
                (ocm_probes, clip_mean, use_clipped_model_output) != (None, None, None),
            )
            self.step_noise = self._own_noise(trajectory, guidance)
            self.trajectory = None if self.step_noise is None else self.step_noise.trajectory
        if self.trajectory is not None:  # which may have been given, whatever steps says
            self.steps = len(self.trajectory)
        self.ocm_probes = None if ocm_probes is None else int(ocm_probes)
        self.condition = model.check_told(condition, _entries(condition))
        self.guidance = check_guidance(guidance)
        # for solvers without a covariance; a process has its own
        self._network = model.guided(model.network.with_only_heads(), guidance)
        if self.guidance != 1 and not self.condition:
            raise ValueError(
                f"guidance = {guidance} moves towards a condition, but none is given; pass labels or a condition"
            )
        self.noise_cap = model.noise_cap(self.method.name) if noise_cap is None else noise_cap or None

    def _along(self, trajectory: str | Trajectory) -> Trajectory:
        """The trajectory that was given, or the bundle's of that name."""
        if isinstance(trajectory, str):
            return self.bundle.trajectory(self.steps, trajectory, self.method.name)
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"trajectory = {trajectory!r:.80} is neither a name such as even nor a Trajectory")
        return trajectory

    def _refuse_options_of_steps(self, steps: bool, covariance: bool) -> None:
        """Refuse what a method without a covariance would ignore: options of its steps, or of its covariance."""
        remedy = f"or choose a method such as {HEAD_METHOD}"
        if steps:
            raise ValueError(
                f"{self.method.name} has times and a last step of its own: leave trajectory, noise_cap and last_step "
                f"out, {remedy}"
            )
        if covariance:
            raise ValueError(
                f"{self.method.name} has no covariance: leave ocm_probes, clip_mean and use_clipped_model_output out, "
                f"{remedy}"
            )

    def _own_noise(self, trajectory: str | Trajectory, guidance: float) -> MultistepNoise | None:
        """Times and noise of Matched 2M and of Bridge 2M; other solvers have none."""
        model = self.bundle
        if self.method.solver == "matched":
            if guidance != 1:
                raise ValueError(f"{self.method.name} has no noise for guidance = {guidance}; take Bridge 2M")
            return model.matched_noise(self.steps)
        if self.method.solver != "bridge":
            return None
        if isinstance(trajectory, str):
            trajectory = few_step_times(model.schedule, self.steps, model.image_shape)
        return BridgeNoise(model.schedule, trajectory)

    @property
    def adaptive(self) -> bool:
        """Whether the method chooses its own steps."""
        return self.method.adaptive

    @property
    def title(self) -> str:
        """The method and its number of steps or tolerance, for display."""
        effort = f"tolerance {self.tolerance:g}" if self.adaptive else f"{self.steps} steps"
        return f"{self.method.name}, {effort}" + ("" if self.guidance == 1 else f", guidance {self.guidance:g}")

    def settings(self) -> dict[str, Any]:
        """Everything that determines the images, as plain JSON values."""
        kind = Covariance.registry.get(self.method.covariance or "")
        needs_numbers = kind is not None and kind.number is not None
        needs_spectra = kind is not None and kind.spectrum is not None
        identity = self.bundle.identity([(kind.head if kind else None) or ""])
        used = {name: entry for name, entry in identity.items() if name not in ("noise caps", "spectra")}
        return {
            "bundle": self.bundle.name,
            **used,
            "numbers": identity["numbers"] if needs_numbers else None,
            **({"spectra": identity.get("spectra")} if needs_spectra else {}),
            "method": self.method.name,
            "convention": self.method.convention,
            "steps": None if self.adaptive else self.steps,
            "times": list(self.trajectory.times) if self.trajectory else None,
            "step_noise": None if self.step_noise is None else self.step_noise.identity(),
            "seed": self.seed,
            "noise_cap": self.noise_cap,
            "last_step": self.last_step,
            "tolerance": self.tolerance if self.adaptive else None,
            "condition": condition_identity(self.condition),
            **({} if self.guidance == 1 else {"guidance": self.guidance}),
            **({} if self.ocm_probes is None else {"ocm_probes": self.ocm_probes}),
            **self.clipping,  # nothing if it is the paper's
        }

    def draw(self, indices: Sequence[int], callback: Callable[[Step], None] | None = None) -> SolverResult:
        """Draw the images with these numbers."""
        check_image_numbers(indices)
        device = self.bundle.device
        drawn = draw(
            self.method,
            self._network,
            self.bundle.schedule,
            self.steps,
            self.bundle.image_shape,
            indices,
            self.seed,
            process=self.process,
            step_noise=self.step_noise,
            trajectory=self.trajectory,
            data_range=self.bundle.data_range,
            noise_cap=self.noise_cap,
            last_step=self.last_step,
            relative_tolerance=self.tolerance,
            condition=self.condition_of(indices, device),
            callback=callback,
            device=device,
        )
        # both halves of guidance are evaluations
        return drawn if self.guidance == 1 else replace(drawn, evaluations=2 * drawn.evaluations)

    def condition_of(self, indices: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """The condition of the images with these numbers."""
        for name, value in self.condition.items():
            if len(indices) and not 0 <= min(indices) <= max(indices) < len(value):
                raise ValueError(
                    f"condition {name!r} has {len(value)} entries, but image number {max(indices)} is asked for; pass "
                    f"one entry for each number from 0"
                )
        return {name: value.to(device) for name, value in take(self.condition, torch.as_tensor(indices)).items()}


def draw_many(
    bundle: Bundle,
    n: int,
    condition: Mapping[str, Tensor] | None,
    batch_size: int,
    progress: bool,
    *,
    method: str | None,
    steps: int,
    labels: Any = None,
    decode: bool = False,
    work: str | Path | None = None,
    **options: Any,
) -> Tensor:
    """`Bundle.sample`: draw n images in batches, on the CPU. Images in the work directory are not drawn again."""
    if decode and bundle.decoder is None:
        raise ValueError(f"{bundle.name} has no decoder: what it draws is what it is; leave decode out")
    if not is_whole(n) or n < 1 or not is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"n = {n!r} and batch_size = {batch_size!r} must be positive whole numbers")
    n, batch_size = int(n), int(batch_size)
    require_memory(4 * n * math.prod(bundle.picture_shape if decode else bundle.image_shape), f"n = {n}: the tensor")
    unknown = [name for name in options if name not in inspect.signature(Sampler).parameters]
    if unknown:
        raise ValueError(
            f"sample has no option {unknown[0]!r}; it has seed, labels, guidance, decode, work, trajectory, noise_cap, "
            f"last_step, tolerance, ocm_probes, clip_mean and use_clipped_model_output"
        )
    condition = check_condition(with_labels(condition, labels, n), n)
    sampler = Sampler(bundle, DEFAULT_METHOD if method is None else method, steps, condition=condition, **options)

    def drawn(indices: range) -> Tensor:
        x_0 = sampler.draw(indices).x_0
        return (bundle.decode(x_0) if decode else x_0).cpu()

    batches = (range(first, min(first + batch_size, n)) for first in range(0, n, batch_size))
    told = track(batches, math.ceil(n / batch_size), sampler.title, "batches", show=progress)
    if work is None:
        return torch.cat([drawn(indices) for indices in told])
    place = check_path(work)
    with directory_lock(place):
        by = bundle.decoder_identity() if decode else {}
        remember(place / "run.json", {**sampler.settings(), "decode": decode, **by}, place)
        return torch.cat([_kept(place / f"images-{i.start:06d}-{i.stop - 1:06d}.safetensors", i, drawn) for i in told])


def _kept(file: Path, indices: range, draw: Callable[[range], Tensor]) -> Tensor:
    """The images of a file, which is made if it is not there."""
    if not file.exists():
        write_tensors(file, {"x_0": draw(indices).contiguous()})
    found = read_tensors(file)[0].get("x_0")
    if found is None or len(found) != len(indices):
        raise StorageError(f"{file} does not hold {len(indices)} images; remove it to draw them again")
    return found


def _clipping(clip_mean: bool | None, use_clipped_model_output: bool | None) -> dict[str, Any]:
    """Options of ReverseProcess, without those that are the paper's."""
    told = {"clip_mean": clip_mean, "use_clipped_model_output": use_clipped_model_output}
    return {name: value for name, value in told.items() if value is not None and (name, value) != ("clip_mean", True)}


def at_times_of(bundle: Bundle, method: Method) -> Bundle:
    """Move a bundle with real times to a grid of 1,000 times, if the method is a diffusers scheduler."""
    if method.solver == "peer" and not bundle.schedule.discrete:
        return bundle.with_schedule(bundle.schedule.on_grid())
    return bundle


def _entries(condition: Any) -> int:
    """How many images a condition is for; what is wrong with it, the check of it says."""
    values = condition.values() if isinstance(condition, Mapping) else ()
    return max((len(value) for value in values if isinstance(value, Tensor) and value.ndim), default=0)
