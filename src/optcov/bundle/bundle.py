"""A bundle: a noise predictor with its heads, numbers per time, trajectories and history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn, no_grad

from optcov.bundle import matched as matched_noises
from optcov.bundle import saving
from optcov.bundle.conditions import check_empty, check_told, classes_of, with_labels
from optcov.bundle.config import check_head_name
from optcov.bundle.errors import BundleError
from optcov.bundle.latents import Codec
from optcov.bundle.numbers import NumbersPerTime
from optcov.bundle.schedules import StoredTrajectory, build_schedule, find_trajectory
from optcov.bundle.spectra import Spectra
from optcov.bundle.weights import check_backbone
from optcov.covariances import Covariance, Spectrum, find_covariance
from optcov.data import ImageSet
from optcov.data import load as load_images
from optcov.data.modes import with_channels
from optcov.data.tensors import DataSet, TensorSet, as_set, fitted_to
from optcov.gaussian import Gaussian
from optcov.identity import digest, digest_tensors, known_by
from optcov.likelihood.result import Likelihoods
from optcov.methods import Method, find_method
from optcov.networks import Head, HeadedNetwork, fingerprint
from optcov.networks.classes import LABELS, class_entries
from optcov.networks.guidance import Guided, check_guidance
from optcov.prediction import Network
from optcov.reverse import ReverseProcess
from optcov.schedule import Schedule, Time, is_whole
from optcov.solvers import MatchedNoise
from optcov.trajectory import KINDS, Trajectory


@final
@dataclass(frozen=True, repr=False)
class Bundle:
    """What is saved and loaded. Methods such as with_heads or with_schedule return a changed copy."""

    network: HeadedNetwork  # (x_t, t, **condition) -> Prediction, t in times of `schedule`
    image_shape: tuple[int, ...]  # (C, H, W)
    data_range: tuple[float, float] | None = (-1.0, 1.0)
    name: str = "bundle"
    numbers: NumbersPerTime | None = None
    trajectories: tuple[StoredTrajectory, ...] = ()
    noise_caps: Mapping[str, float | None] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    fingerprint: str = ""  # of the noise predictor's weights
    classes: int | None = None  # that the network tells apart, without an empty one; found in the network by default
    decoder: nn.Module | None = None  # what turns latents into images and back
    spectra: Spectra | None = None
    matched: tuple[MatchedNoise, ...] = ()  # what Matched 2M draws with, by schedule and number of steps

    def __post_init__(self) -> None:
        if self.classes is None:
            object.__setattr__(self, "classes", classes_of(self.unet, self.network.empty_condition))
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
        """The schedule in use: the network's own, unless `with_schedule` chose another."""
        return self.network.schedule

    @property
    def unet(self) -> nn.Module:
        """The noise predictor itself: a network of diffusers, or a module or function of your own."""
        return self.network.backbone.module

    @property
    def device(self) -> torch.device:
        """The device of the network; the CPU for a function without weights."""
        return next(self.unet.parameters(), torch.empty(0)).device

    @property
    def heads(self) -> dict[str, Head]:
        """The heads by name."""
        return dict(self.network.heads.items())  # type: ignore[arg-type]

    def encode(self, images: Tensor) -> Tensor:
        """Encode images (n, C, H, W) in [-1, 1] to scaled latents (n, c, h, w), by the encoder's mode."""
        return self._codec().encode(images)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (n, c, h, w) to images in [-1, 1]."""
        return self._codec().decode(latents)

    def as_images(self, x_0: Tensor) -> Tensor:
        """Return samples as images: latents are decoded, images stay as they are."""
        return x_0 if self.decoder is None else self.decode(x_0)

    def decoder_identity(self) -> dict[str, Any]:
        """The decoder's entry of an identity; empty for a bundle without a decoder."""
        return {} if self.decoder is None else {"decoder": self._codec().identity()}

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one image; for latents, of the decoded image."""
        if self.decoder is None:
            return tuple(self.image_shape)
        codec, (_, *sides) = self._codec(), self.image_shape
        return (codec.colours, *(codec.factor * side for side in sides))

    def as_latents(self, data: DataSet) -> DataSet:
        """Encode 8-bit images, if the network takes latents; other data stays as it is."""
        if self.decoder is None or not isinstance(data, ImageSet):
            return data
        codec = self._codec()
        parts = [codec.encode(part).cpu() for part in with_channels(data, codec.colours).batches(64)]
        return TensorSet(torch.cat(parts), data.labels, data.name, data.captions)

    def data_of(self, images: Any, split: str) -> DataSet:
        """Open images as the network takes them; they may be a tensor, a set or a path."""
        found = load_images(images, split) if isinstance(images, str | Path) else as_set(images)
        return fitted_to(self.as_latents(found), self.image_shape, self.name)

    def _codec(self) -> Codec:
        if self.decoder is None:
            raise BundleError(f"{self.name} has no decoder: what it draws is what it is; leave decode out")
        return Codec(self.decoder)

    @property
    def empty_condition(self) -> dict[str, Tensor]:
        """The condition that stands for no condition, each entry (1, ...).

        Guidance uses it, and so does a call without a condition.
        """
        return self.network.empty_condition

    @property
    def class_numbers(self) -> list[int]:
        """The labels of the classes, without the empty one; an empty list for a network without classes."""
        empty = self.empty_condition.get(LABELS)
        entries = 0 if self.classes is None else self.classes + (empty is not None)
        return [label for label in range(entries) if empty is None or label != int(empty)]

    def told_labels(self, labels: Tensor, whose: str) -> dict[str, Tensor]:
        """Turn the labels (B,) of data into a condition; each must be one of the classes, but not the empty one."""
        known = self.class_numbers
        strange = ~torch.isin(labels.cpu(), torch.tensor(known))
        if bool(strange.any()):
            raise BundleError(
                f"{whose} has images of class {int(labels.cpu()[strange][0])}, but the {len(known)} classes of "
                f"{self.name} are {known[0]} to {known[-1]}"
            )
        return {LABELS: labels}

    def check_told(self, condition: Mapping[str, Tensor] | None, count: int) -> dict[str, Tensor]:
        """Return a checked condition for `count` images, or raise a ValueError; see optcov.bundle.conditions."""
        return check_told(condition, count, self.name, self.classes, self.empty_condition, self.unet)

    def identity(self, heads: Collection[str] | None = None) -> dict[str, Any]:
        """Everything that its results depend on, by name; see optcov.identity.

        heads: the heads to include, by default all. The bundle's name, history and stored trajectories are left out,
        because they change no result.
        """
        numbers = None if self.numbers is None else known_by(digest_tensors(self.numbers.tensors()))
        spectra = {} if self.spectra is None else {"spectra": known_by(digest_tensors(self.spectra.tensors()))}
        return {
            **self.network.identity(heads),
            "numbers": numbers,
            **spectra,
            "data range": None if self.data_range is None else list(self.data_range),
            "image shape": list(self.image_shape),
            "noise caps": dict(self.noise_caps),
            **({} if self.classes is None else {"classes": self.classes}),
        }

    def on_its_own_schedule(self) -> Bundle:
        """Return the bundle on the schedule that its network was trained on."""
        return replace(self, network=self.network.on_its_own_schedule())

    def digest(self) -> str:
        """SHA-256 of the identity, in hexadecimal."""
        return digest(self.identity())

    def with_schedule(self, schedule: str | Mapping[str, Any] | Schedule) -> Bundle:
        """Use the same network at times of another schedule, e.g. "linear". Times are matched by their log-SNR."""
        return replace(self, network=self.network.with_schedule(build_schedule(schedule)))

    def with_heads(self, heads: Mapping[str, Head], fitted_on: str) -> Bundle:
        """Add heads, or replace heads of the same name.

        fitted_on: the fingerprint of the weights that the heads were fitted on. Optimal trajectories of methods that
        use these heads are removed, because the old heads chose them. Correlations that belong to a replaced head are
        removed, too.
        """
        for name in heads:
            check_backbone(check_head_name(name), fitted_on, self.fingerprint)
        network = self.network.with_heads({**self.heads, **heads})
        kept = self._trajectories_without(lambda kind: kind.head in heads)
        spectra = None if self.spectra is None else self.spectra.without(heads)
        return replace(self, network=network, trajectories=kept, spectra=spectra)

    def with_empty_condition(self, empty_condition: Mapping[str, Tensor]) -> Bundle:
        """Set the condition that stands for no condition, each entry (1, ...). Heads and numbers stay."""
        check_empty(empty_condition, self.unet)
        network = self.network.with_empty_condition({name: value.detach() for name, value in empty_condition.items()})
        return replace(self, network=network, classes=classes_of(self.unet, empty_condition))

    def with_empty_class(self, label: int) -> Bundle:
        """Set which entry of the network's class table stands for no class."""
        entries = class_entries(self.unet)
        if entries is None:
            raise BundleError(f"{self.name} knows no classes, so that none of them can be the empty one")
        if not is_whole(label) or not 0 <= label < entries or entries < 2:
            raise BundleError(
                f"empty_class = {label!r} is none of the {entries} classes 0 to {entries - 1} of {self.name}"
            )
        return self.with_empty_condition({LABELS: torch.tensor([int(label)])})

    def with_numbers(self, numbers: NumbersPerTime) -> Bundle:
        """Set the numbers per time. Optimal trajectories of methods that use them are removed."""
        self.network.native_schedule.check_times(numbers.times)
        kept = self._trajectories_without(lambda kind: kind.number is not None)
        return replace(self, numbers=numbers, trajectories=kept)

    def with_spectra(self, spectra: Spectra) -> Bundle:
        """Set the spectra. Optimal trajectories of methods that use them are removed."""
        spectra.check_fits(self.image_shape, self.network.native_schedule)
        kept = self._trajectories_without(lambda kind: kind.spectrum is not None)
        return replace(self, spectra=spectra, trajectories=kept)

    def with_trajectories(self, method: str, trajectories: Sequence[Trajectory]) -> Bundle:
        """Add optimal trajectories of a method on the schedule in use. They replace stored ones of the same length."""
        row = find_method(method)
        if row.covariance is None:
            raise BundleError(f"{row.name} has no covariance, so that no trajectory is optimal for it")
        new = [StoredTrajectory(self.schedule, row.name, t) for t in trajectories]
        keys = {entry.key for entry in new}
        kept = [entry for entry in self.trajectories if entry.key not in keys]
        return replace(self, trajectories=(*kept, *new))

    def with_matched_noise(
        self, images: Any, steps: int = 10, *, trajectory: Trajectory | None = None, **options: Any
    ) -> Bundle:
        """Measure the noise of Matched 2M for `steps` steps on the schedule in use, and keep it.

        images: a few hundred training images or more, (n, C, H, W) in [-1, 1] or uint8, or a path.
        trajectory: the times to visit. By default Karras times; their last step starts at the noise-to-signal ratio 1 /
        steps.
        options: those of optcov.solvers.match_noise, such as eta, samples (the number of start noises, 512), seed,
        condition or progress.

        >>> import optcov
        >>> from optcov.bundle import test_images
        >>> bundle = optcov.load("fashion").with_matched_noise(test_images("fashion")[:32], steps=3, samples=16)
        >>> bundle.sample(2, method="Matched 2M", steps=3, progress=False).shape
        torch.Size([2, 1, 28, 28])
        """
        if trajectory is not None and not isinstance(trajectory, Trajectory):
            raise BundleError(f"trajectory = {trajectory!r:.80} is not a Trajectory; pass Trajectory(times)")
        times = matched_noises.times_of(self.schedule, steps) if trajectory is None else trajectory
        new = matched_noises.measure(self, images, times, options)
        return replace(self, matched=matched_noises.with_entry(self.matched, new))

    def matched_noise(self, steps: int) -> MatchedNoise:
        """The stored noise of Matched 2M for `steps` steps on the schedule in use."""
        return matched_noises.find(self.matched, self.schedule, steps, self.name)

    def with_provenance(self, **sections: Any) -> Bundle:
        """Add sections of plain JSON values to the history, or replace sections of the same name."""
        return replace(self, provenance=MappingProxyType({**self.provenance, **sections}))

    def with_float16_weights(self) -> Bundle:
        """Round the noise predictor's weights to float16, so that it takes half the space on disk.

        Do this before fitting heads and measuring numbers, because those belong to the weights that they were fitted
        on.
        """
        measured = (self.numbers, self.spectra, self.matched or None)
        if len(self.network.heads) or any(part is not None for part in measured):
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
        """mean_square_noise or mean_square_residual as a function of the times of the schedule in use, float64."""
        if self.numbers is None:
            raise BundleError(f"{self.name} has no numbers per time; measure them (optcov fit does, on the way)")
        return self.numbers.function(name, self.network.native_schedule, self.schedule)

    def spectrum(self, name: str) -> Spectrum:
        """The spectrum "residual", or the correlation of a head, as a function of the times of the schedule in use."""
        if self.spectra is None:
            raise BundleError(
                f"{self.name} has no spectra of its residuals; fit it again without measure_images = 0 "
                f"(--measure-images 0), which leaves them out"
            )
        return self.spectra.function(name, self.image_shape, self.network.native_schedule, self.schedule)

    def reverse_process(
        self, method: str | Method, *, all_heads: bool = True, guidance: float = 1.0, **options: Any
    ) -> ReverseProcess:
        """Compose a method of METHODS with this network; options go to ReverseProcess.

        all_heads: True computes all heads of the network. False computes only the head of the covariance, which is
        enough for a sampler.
        guidance: the weight of classifier-free guidance. 1 means none: the prediction is the network's own.
        """
        row = method if isinstance(method, Method) else find_method(method)
        forward = row.forward(self.schedule)
        options = {"covariance": row.covariance, "data_range": self.data_range, **options}
        covariance, network = options["covariance"], self.network
        if isinstance(covariance, str):
            kind = find_covariance(covariance)
            head = kind.head if options.get("ocm_probes") is None else None
            if head is not None:
                self._require_head(kind)
            if kind.number is not None:
                options.setdefault(kind.number, self.per_time(kind.number))
            if kind.spectrum is not None and "spectrum" not in options:
                options["spectrum"] = self.spectrum(kind.spectrum)
            if not all_heads:
                network = network.with_only_heads(head or "")
        return ReverseProcess(self.guided(network, guidance), forward, **options)

    def guided(self, network: HeadedNetwork, guidance: float) -> Network:
        """Add guidance to a network of this bundle. With guidance 1 the network is returned as it is."""
        if check_guidance(guidance) == 1:
            return network
        if not self.empty_condition:
            raise BundleError(
                f"guidance = {guidance} needs an empty condition to move away from, and {self.name} has none; leave "
                f"guidance out, or fit with empty_class (--empty-class) if one of the classes stands for none"
            )
        return Guided(network, guidance, self.empty_condition)

    def sample(
        self,
        n: int,
        *,
        method: str | None = None,
        steps: int = 10,
        seed: int = 0,
        condition: Mapping[str, Tensor] | None = None,
        labels: Any = None,
        guidance: float = 1.0,
        decode: bool = False,
        batch_size: int = 64,
        progress: bool = True,
        work: str | Path | None = None,
        **options: Any,
    ) -> Tensor:
        """Draw n images: x_0, (n, C, H, W), on the CPU.

        method: a name from METHODS, "Bridge 2M", "Matched 2M" or a diffusers scheduler; `optcov sample --help` lists
        them all. The default is Bridge 2M, which needs no head. It is made for about ten steps; other methods need
        more.
        condition: further inputs of the network by name, each a tensor with one entry per image. Without one, the
        network gets the empty condition.
        labels: the classes to draw, one for all images or one for each; a short form of condition.
        guidance: the weight of classifier-free guidance. 0 ignores the condition, 1 uses it without guidance, larger
        weights strengthen it.
        decode: decode latents, and return images in [-1, 1].
        work: a directory that keeps the images drawn so far. The same call with the same directory resumes.
        options: those of `Sampler`, such as trajectory="optimal" with method="NPR-DDPM".

        Image i depends on (seed, i) and its condition alone, not on n or batch_size.

        >>> import optcov
        >>> optcov.load("fashion").sample(2, steps=3, progress=False).shape
        torch.Size([2, 1, 28, 28])
        """
        from optcov.bundle.sampler import draw_many

        options |= {"method": method, "steps": steps, "seed": seed, "labels": labels, "guidance": guidance}
        return draw_many(self, n, condition, batch_size, progress, decode=decode, work=work, **options)

    def bits_per_dim(self, images: Any, steps: Sequence[int] | int = (10, 25), **options: Any) -> Likelihoods:
        """Bound the bits/dim of images for every covariance, at even times.

        images: (n, C, H, W) in [-1, 1] or uint8, or a path. A network with classes is given the labels that come with
        the images.
        methods: the methods to score, such as ["NPR-DDPM"]; by default all that the bundle can do.
        options: seed, last_variance ("paper" | "own"), cdf, condition or labels, batch_size, progress, and work. work
        is a directory; the same call with it resumes.

        The result prints as a table, plots, and gives numbers: `result.of("npr", 10).mean`.

        >>> import optcov
        >>> from optcov.bundle import test_images
        >>> score = optcov.load("fashion").bits_per_dim(test_images("fashion")[:2], steps=3, progress=False)
        >>> sorted({row.K for row in score.rows})
        [3]
        """
        from optcov.bundle.scoring import score_tensor

        return score_tensor(self, images, steps, **options)

    def class_log_probabilities(self, images: Any, steps: int = 10, **options: Any) -> Tensor:
        """log p(class given image) from the bound of each class, with equal priors: float64 (B, classes).

        images: (n, C, H, W) in [-1, 1] or uint8, or a path. Columns are in the order of `class_numbers`. All classes
        see the same noise. The cost is steps times classes evaluations per image.
        options: method, seed, batch_size, progress. The default method is A-DDPM, if the bundle has numbers per time.
        It tells classes apart better than methods with tighter bounds (docs/how-to/classes-and-guidance.md).
        """
        from optcov.bundle.classifying import class_log_probabilities

        return class_log_probabilities(self, images, steps, **options)

    def posterior(
        self,
        x_t: Tensor,
        t: Time,
        covariance: str = "npr",
        *,
        labels: Any = None,
        ocm_probes: int | None = None,
        **condition: Tensor,
    ) -> Gaussian:
        """The Gaussian over x_0 given x_t (B, C, H, W) at a time t of `schedule`: its mean, and a variance per pixel.

        labels: the classes, one for all images or one for each.
        condition: other conditions, by the names that the network has for them.
        ocm_probes: for the covariance "ocm", use this many probes of the Jacobian instead of a fitted head.

        >>> import optcov, torch
        >>> known = optcov.load("fashion").posterior(torch.zeros(1, 1, 28, 28), 0.5)
        >>> known.mean.shape, known.variance.shape
        (torch.Size([1, 1, 28, 28]), torch.Size([1, 1, 28, 28]))
        """
        row = Method("posterior", continuous=False, eta=1.0, covariance=find_covariance(covariance).name)
        if not isinstance(x_t, Tensor) or tuple(x_t.shape[1:]) != tuple(self.image_shape) or not len(x_t):
            found = tuple(x_t.shape) if isinstance(x_t, Tensor) else f"a {type(x_t).__name__}"
            raise BundleError(f"x_t is {found}; {self.name} takes a tensor of shape (B, *{tuple(self.image_shape)})")
        told = self.check_told(with_labels(condition, labels, len(x_t)), len(x_t))
        with no_grad():
            return self.reverse_process(row, all_heads=False, ocm_probes=ocm_probes).posterior(x_t, t, **told)

    def noise_cap(self, method: str) -> float | None:
        """The paper's y for a method: the bundle's own value, or else the paper's; None for data without a range."""
        row = find_method(method)
        if self.data_range is None:  # latents have no 8-bit levels
            return None
        return self.noise_caps.get(row.name, row.noise_cap)

    def trajectory(self, K: int, kind: str = "even", method: str = "NPR-DDPM") -> Trajectory:
        """K times of the schedule.

        kind: "even", "quadratic", "karras", or "optimal". "optimal" needs a stored trajectory of the method.
        """
        if kind == "optimal":
            return find_trajectory(self.trajectories, self.schedule, find_method(method).name, K)
        if not isinstance(kind, str) or kind not in KINDS:
            raise BundleError(f"unknown kind of trajectory {kind!r}; choose one of {', '.join(KINDS)}, optimal")
        return KINDS[kind](self.schedule, K)

    @staticmethod
    def check_target(directory: str | Path) -> None:
        """Raise the error that `save` to this directory would raise. Call it before hours of work."""
        saving.check_target(directory)

    def check_loadable(self) -> None:
        """Raise the error that loading the saved bundle would raise. Call it before long work, and before writing."""
        saving.check_loadable(self)

    def save(self, directory: str | Path) -> None:
        """Write the bundle as a directory, completely or not at all. An older bundle there is replaced."""
        saving.save(self, directory)

    def _trajectories_without(self, gone: Callable[[type[Covariance]], bool]) -> tuple[StoredTrajectory, ...]:
        return tuple(
            entry
            for entry in self.trajectories
            if not gone(find_covariance(find_method(entry.method).covariance or ""))
        )

    def _require_head(self, kind: type[Covariance]) -> None:
        needed = kind.head
        if needed in (None, *self.network.heads, *self.network.output_heads):
            return
        present = ", ".join(sorted(self.network.heads)) or "none"
        raise BundleError(
            f"{self.name} has no head {needed!r}, which the covariance {kind.name!r} needs; "
            f"it has: {present}. Fit the head first (optcov fit --heads {needed})"
            + (", or pass ocm_probes=8 (optcov sample --ocm-probes 8)" if needed == "ocm" else "")
        )
