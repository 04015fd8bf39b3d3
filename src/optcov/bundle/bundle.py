"""A bundle: a noise predictor with its heads, numbers per time, trajectories and history, as one directory.

config.json               what the weights mean: schedule, time argument, image shape, data range, noise caps
unet/                     the noise predictor, in diffusers' format
heads/NAME.safetensors    each head, with the fingerprint of the backbone that it was fitted on
numbers.safetensors       Gamma_t and the mean square residual at some times
trajectories.json         optimal trajectories, by schedule and method
provenance.json           data, code, seeds, hyper-parameters, measured calibration
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from torch import Tensor, nn, no_grad

from optcov import storage
from optcov.bundle.config import BundleConfig, check_head_name
from optcov.bundle.directory import atomic_directory, check_path, check_replaceable
from optcov.bundle.errors import BundleError
from optcov.bundle.numbers import NumbersPerTime
from optcov.bundle.schedules import StoredTrajectory, build_schedule, find_trajectory
from optcov.bundle.weights import check_backbone, check_images, check_unet, save_head, save_unet
from optcov.covariances import Covariance, find_covariance
from optcov.gaussian import Gaussian
from optcov.identity import digest, digest_tensors, known_by
from optcov.likelihood.result import Likelihoods
from optcov.methods import Method, find_method
from optcov.networks import Head, HeadedNetwork, fingerprint
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule, Time
from optcov.trajectory import Trajectory

CONFIG, UNET, HEADS, NUMBERS = "config.json", "unet", "heads", "numbers.safetensors"
TRAJECTORIES, PROVENANCE = "trajectories.json", "provenance.json"
FILES = frozenset({CONFIG, UNET, HEADS, NUMBERS, TRAJECTORIES, PROVENANCE, ".lock"})


@final
@dataclass(frozen=True, repr=False)
class Bundle:
    """What is saved and loaded. Changes make a new bundle: with_heads, with_numbers, with_schedule, ..."""

    network: HeadedNetwork  # (x_t, t, **condition) -> Prediction, t in times of `schedule`
    image_shape: tuple[int, ...]  # (C, H, W)
    data_range: tuple[float, float] | None = (-1.0, 1.0)
    name: str = "bundle"
    numbers: NumbersPerTime | None = None
    trajectories: tuple[StoredTrajectory, ...] = ()
    noise_caps: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    fingerprint: str = ""  # of the noise predictor's weights

    def __post_init__(self) -> None:
        for name in self.network.heads:
            check_head_name(name)
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint(self.unet))

    def __repr__(self) -> str:
        heads = ", ".join(self.network.heads) or "none"
        return f"Bundle({self.name!r}, data {self.image_shape}, heads {heads}, {self.schedule!r})"

    def __str__(self) -> str:
        from optcov.bundle.description import text

        return text(self)

    def _repr_html_(self) -> str:
        from optcov.bundle.description import page

        return page(self)

    @property
    def schedule(self) -> Schedule:
        """The schedule in use; the network's own unless `with_schedule` chose another."""
        return self.network.schedule

    @property
    def unet(self) -> nn.Module:
        """The noise predictor, a diffusers UNet2DModel."""
        return self.network.backbone.module

    @property
    def heads(self) -> dict[str, Head]:
        """Heads by name."""
        return dict(self.network.heads.items())  # type: ignore[arg-type]

    def identity(self, heads: Collection[str] | None = None) -> dict[str, Any]:
        """What its numbers depend on, by name: see optcov.identity. heads: those that matter, by default all.

        Its name, its history and its stored trajectories change no number of its own.
        """
        numbers = None if self.numbers is None else known_by(digest_tensors(self.numbers.tensors()))
        return {
            **self.network.identity(heads),
            "numbers": numbers,
            "data range": None if self.data_range is None else list(self.data_range),
            "image shape": list(self.image_shape),
            "noise caps": dict(self.noise_caps),
        }

    def on_its_own_schedule(self) -> Bundle:
        """The bundle at the times that its network was trained on."""
        return replace(self, network=self.network.on_its_own_schedule())

    def digest(self) -> str:
        """SHA-256 of the identity, in hexadecimal."""
        return digest(self.identity())

    def with_schedule(self, schedule: str | Mapping[str, Any] | Schedule) -> Bundle:
        """Use the same network at times of another schedule, e.g. "linear", by matching alpha-bar."""
        return replace(self, network=self.network.with_schedule(build_schedule(schedule)))

    def with_heads(self, heads: Mapping[str, Head], fitted_on: str) -> Bundle:
        """Add heads, or replace those of the same name; fitted_on is the fingerprint of the weights they belong to.

        Optimal trajectories of methods with a new head go: they were found with the old one.
        """
        for name in heads:
            check_backbone(check_head_name(name), fitted_on, self.fingerprint)
        old = self.network
        network = HeadedNetwork(
            old.backbone,
            old.native_schedule,
            {**self.heads, **heads},
            old.time_argument,
            old.parameterisation,
            old.learned_range,
        ).train(old.training)
        moved = network if old.schedule is old.native_schedule else network.with_schedule(old.schedule)
        return replace(self, network=moved, trajectories=self._trajectories_without(lambda kind: kind.head in heads))

    def with_numbers(self, numbers: NumbersPerTime) -> Bundle:
        """Set the numbers per time; optimal trajectories of methods that use such numbers go."""
        self.network.native_schedule.check_times(numbers.times)
        kept = self._trajectories_without(lambda kind: kind.number is not None)
        return replace(self, numbers=numbers, trajectories=kept)

    def with_trajectories(self, method: str, trajectories: Sequence[Trajectory]) -> Bundle:
        """Add optimal trajectories of a method on the schedule in use; those of the same length go."""
        new = [StoredTrajectory(self.schedule, find_method(method).name, t) for t in trajectories]
        keys = {entry.key for entry in new}
        kept = [entry for entry in self.trajectories if entry.key not in keys]
        return replace(self, trajectories=(*kept, *new))

    def with_provenance(self, **sections: Any) -> Bundle:
        """Add sections to the history, or replace those of the same name; plain JSON values."""
        return replace(self, provenance=MappingProxyType({**self.provenance, **sections}))

    def with_float16_weights(self) -> Bundle:
        """Round the noise predictor's weights to float16, so that it is stored in half the space.

        Heads and numbers belong to the weights as they are; fit and measure them afterwards.
        """
        if len(self.network.heads) or self.numbers is not None:
            raise BundleError("round the weights before fitting heads and measuring numbers, which belong to the old")
        state = {
            name: w.half().to(w.dtype) if w.is_floating_point() else w for name, w in self.unet.state_dict().items()
        }
        bad = [name for name, w in state.items() if not bool(w.isfinite().all())]
        if bad:
            raise BundleError(f"the weight {bad[0]!r} is too large for float16, whose largest number is 65504")
        network = copy.deepcopy(self.network)
        network.backbone.module.load_state_dict(state)
        return replace(self, network=network, fingerprint="")

    def per_time(self, name: str) -> Callable[[Time], Tensor]:
        """mean_square_noise or mean_square_residual as a function of the schedule's times, float64."""
        if self.numbers is None:
            raise BundleError(f"{self.name} has no numbers per time; measure them (optcov fit does, on the way)")
        return self.numbers.function(name, self.network.native_schedule, self.schedule)

    def reverse_process(
        self, method: str | Method, *, all_heads: bool = True, paper_exact: bool = False, **options: Any
    ) -> ReverseProcess:
        """Compose a method of METHODS with this network; options go to ReverseProcess.

        paper_exact: clip x0_hat as the paper does, and not as is chosen for images (docs/clipping.md).
        all_heads: whether the network computes all its heads, or that of the covariance alone, as a sampler needs it.
        """
        row = method if isinstance(method, Method) else find_method(method)
        forward = row.forward(self.schedule)
        options = {
            "covariance": row.covariance,
            "data_range": self.data_range,
            **row.clipping(paper_exact),
            **options,
        }
        covariance = options["covariance"]
        network = self.network
        if isinstance(covariance, str):
            kind = find_covariance(covariance)
            head = kind.head if options.get("ocm_probes") is None else None
            if head is not None:
                self._require_head(kind)
            if kind.number is not None:
                options.setdefault(kind.number, self.per_time(kind.number))
            if not all_heads:
                network = network.with_only_heads(head or "")
        return ReverseProcess(network, forward, **options)

    def sample(
        self,
        n: int,
        *,
        method: str | None = None,
        steps: int = 25,
        seed: int = 0,
        condition: Mapping[str, Tensor] | None = None,
        batch_size: int = 64,
        progress: bool = True,
        **options: Any,
    ) -> Tensor:
        """Draw n images by a method of METHODS: x_0, (n, C, H, W), on the CPU.

        method: by default the one that suits the bundle, NPR-DDIM if it has that head. condition: what else the network
        takes by name, each a tensor with one entry per image. Image i depends on (seed, i) alone, not on n or
        batch_size. options: those of `Sampler`, such as trajectory="optimal".

        >>> import optcov
        >>> optcov.load("fashion").sample(2, method="NPR-DDIM", steps=3, progress=False).shape
        torch.Size([2, 1, 28, 28])
        """
        from optcov.bundle.sampler import draw_many

        options = {"method": method, "steps": steps, "seed": seed, **options}
        return draw_many(self, n, condition, batch_size, progress, **options)

    def bits_per_dim(self, images: Any, steps: Sequence[int] | int = (10, 25), **options: Any) -> Likelihoods:
        """Bound the bits/dim of images, (n, C, H, W) in [-1, 1] or uint8 or a path, for every covariance at even times.

        methods: those to score, such as ["NPR-DDPM"], by default all that the bundle can do. Other options: seed,
        last_variance ("paper" | "own"), cdf, condition, batch_size, progress. The result prints as a table, plots, and
        is data: `result.of("npr", 10).mean`.

        >>> import optcov
        >>> from optcov.bundle import test_images
        >>> score = optcov.load("fashion").bits_per_dim(test_images("fashion")[:2], steps=3, progress=False)
        >>> sorted({row.K for row in score.rows})
        [3]
        """
        from optcov.bundle.scoring import score_tensor

        return score_tensor(self, images, steps, **options)

    def posterior(self, x_t: Tensor, t: Time, covariance: str = "npr", **condition: Tensor) -> Gaussian:
        """The Gaussian over x_0 given x_t (B, C, H, W) at a time of `schedule`: mean, and variance per pixel.

        >>> import optcov, torch
        >>> known = optcov.load("fashion").posterior(torch.zeros(1, 1, 28, 28), 0.5)
        >>> known.mean.shape, known.variance.shape
        (torch.Size([1, 1, 28, 28]), torch.Size([1, 1, 28, 28]))
        """
        row = Method("posterior", continuous=False, eta=1.0, covariance=find_covariance(covariance).name)
        if not isinstance(x_t, Tensor) or tuple(x_t.shape[1:]) != tuple(self.image_shape) or not len(x_t):
            found = tuple(x_t.shape) if isinstance(x_t, Tensor) else f"a {type(x_t).__name__}"
            raise BundleError(f"x_t is {found}; {self.name} takes a tensor of shape (B, *{tuple(self.image_shape)})")
        with no_grad():
            return self.reverse_process(row, all_heads=False).posterior(x_t, t, **condition)

    def noise_cap(self, method: str) -> float | None:
        """The y that a method is sampled with: the bundle's own, or else the paper's."""
        row = find_method(method)
        return self.noise_caps.get(row.name, row.noise_cap)

    def trajectory(self, K: int, kind: str = "even", method: str = "NPR-DDPM") -> Trajectory:
        """K times of the schedule: "even", "quadratic", "karras", or "optimal" for a method, if it was stored."""
        kinds = {"even": Trajectory.even, "quadratic": Trajectory.quadratic, "karras": Trajectory.karras}
        if kind == "optimal":
            return find_trajectory(self.trajectories, self.schedule, find_method(method).name, K)
        if kind not in kinds:
            raise BundleError(f"unknown kind of trajectory {kind!r}; choose one of {', '.join(kinds)}, optimal")
        return kinds[kind](self.schedule, K)

    @staticmethod
    def check_target(directory: str | Path) -> None:
        """Raise the error that `save` to this directory would, before hours of work go into what is to be saved."""
        check_replaceable(Path(directory), FILES)

    def check_loadable(self) -> None:
        """Raise the error that loading the saved bundle would: to be asked before long work, and before writing."""
        try:
            config = BundleConfig.from_json(self._config().to_json())
            check_unet(self.unet)
            check_images(self.unet, config.image_shape, config.learned_range)
        except BundleError as error:
            raise BundleError(f"{self.name} would make a bundle that cannot be loaded: {error}") from error

    def save(self, directory: str | Path) -> None:
        """Write the bundle as a directory, whole or not at all, also in the place of an older bundle."""
        check_path(directory)
        self.check_loadable()
        if fingerprint(self.unet) != self.fingerprint:
            raise BundleError(
                f"{self.name}: the weights of the noise predictor changed since the bundle was made, so its "
                f"heads and numbers no longer belong to it; make a new bundle from the changed network"
            )
        with atomic_directory(Path(directory), FILES) as scratch:
            storage.write_json(scratch / CONFIG, self._config().to_json())
            save_unet(scratch / UNET, self.unet)
            for name, head in self.heads.items():
                save_head(scratch / HEADS / f"{name}.safetensors", head, self.fingerprint)
            if self.numbers is not None:
                storage.write_tensors(scratch / NUMBERS, self.numbers.tensors())
            storage.write_json(scratch / TRAJECTORIES, [entry.to_json() for entry in self.trajectories])
            storage.write_json(scratch / PROVENANCE, dict(self.provenance))

    def _config(self) -> BundleConfig:
        network = self.network
        return BundleConfig(
            schedule=network.native_schedule,
            time_argument=network.time_argument,
            image_shape=self.image_shape,
            parameterisation=network.parameterisation,
            learned_range=network.learned_range,
            data_range=self.data_range,
            heads=tuple(network.heads),
            noise_caps=self.noise_caps,
        )

    def _trajectories_without(self, gone: Callable[[type[Covariance]], bool]) -> tuple[StoredTrajectory, ...]:
        return tuple(
            entry
            for entry in self.trajectories
            if not gone(find_covariance(find_method(entry.method).covariance or ""))
        )

    def _require_head(self, kind: type[Covariance]) -> None:
        needed = kind.head
        if needed is None or needed in self.network.heads or (needed == "range" and self.network.learned_range):
            return
        present = ", ".join(sorted(self.network.heads)) or "none"
        raise BundleError(
            f"{self.name} has no head {needed!r}, which the covariance {kind.name!r} needs; "
            f"it has: {present}. Fit the head first (optcov fit)"
        )
