"""A fit as one call: heads, numbers per time and calibration for an existing model, saved as a bundle.

`FitPlan` checks everything that can be refused. Its `run` does the long work, and resumes in a work directory if it was
stopped. `fit` does both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from optcov.bundle import Bundle
from optcov.bundle.directory import check_path
from optcov.bundle.errors import BundleError
from optcov.covariances import of_head
from optcov.data import ImageSet
from optcov.fitting.batches import Batches, Conditioned, batch_count, step_generator
from optcov.fitting.budget import FitEstimate, estimate, evaluations, share_out
from optcov.fitting.calibration import calibrate
from optcov.fitting.closed_form import FitReport
from optcov.fitting.conditions import Part, open_parts, told_to
from optcov.fitting.config import TrainingConfig, TrainingError
from optcov.fitting.fit_run import fit_identity
from optcov.fitting.heads import new_heads
from optcov.fitting.latents import LATENTS, foreign_parts, unless_refused
from optcov.fitting.loop import track_training
from optcov.fitting.measure import interpolation_error, measure, numbers_per_time, smoothed, time_grid
from optcov.fitting.precision import mixed_precision
from optcov.fitting.score import SampleScore, ScoreSettings
from optcov.fitting.settings import FitSettings
from optcov.fitting.sources import Model, open_foreign, open_model
from optcov.fitting.spectra import SpectrumMeter
from optcov.fitting.stage2 import CACHE_BYTES, fit_closed_form, train_heads
from optcov.fitting.trial import try_network
from optcov.identity import remember
from optcov.processes import accelerator, this_process
from optcov.progress import track, watch_passes
from optcov.schedule import Schedule
from optcov.storage import directory_lock
from optcov.text_table import counted

LEARNED = "; the second half of its channels is a variance that it learned, kept as the covariance range"


@final
class FitPlan:
    """A fit before it begins: the model and the data are opened, and all options are checked."""

    def __init__(
        self,
        model: Model,
        data: Any,
        heads: Sequence[str] = ("sn", "npr"),
        settings: FitSettings | None = None,
        schedule: str | Schedule | None = None,
        condition: Mapping[str, Tensor] | None = None,
        layer: str | None = None,
        cache: Path | None = None,
        progress: bool = True,
    ):
        settings = settings or FitSettings()
        held_out = settings.calibration_samples > 0
        foreign = open_foreign(model, layer, settings.empty_class)
        if foreign is None:
            opened = open_model(model, schedule, settings.half, settings.empty_class)
        elif schedule is not None:
            raise TrainingError("the model knows its schedule; leave schedule out")
        else:
            wanted = (max(settings.images, settings.measure_images), settings.calibration_samples)
            opened, train, test = foreign_parts(foreign, data, condition, held_out, wanted, cache, progress)
        self.bundle = bundle = opened.on_its_own_schedule()  # heads and numbers belong to the times it was trained at
        self.moved_to = opened.schedule if opened.schedule is not bundle.schedule else None
        self.grid = time_grid(bundle.network.native_schedule, settings.times or None)
        share = share_out(settings, len(self.grid))
        if share.times < len(self.grid):
            self.grid = time_grid(bundle.network.native_schedule, share.times)
        counts = {name: value for name, value in asdict(share).items() if name != "times"}
        self.settings = settings = replace(settings, **counts)
        bundle.check_loadable()
        if foreign is None:
            taken = (bundle.image_shape, bundle.data_range, bundle.name)
            train, test = open_parts(data, condition, held_out, *taken)
        self.train = self._told(train, "train")
        self.test = None if test is None or not settings.calibration_samples else self._told(test, "test")
        # a network that learned its variance keeps it in the place of a head
        self.heads = [name for name in _names(heads) if name not in bundle.network.output_heads]
        self.loss = "mse" if settings.paper_exact else "gamma"
        kind = None if settings.kind == "auto" else settings.kind
        if self.heads and bundle.network.backbone.tap is None:
            raise TrainingError(
                f"{bundle.name} is a function without layers, so that heads have nothing to read; pass heads=() to "
                f"measure the numbers per time alone, or give a torch module and the name of its output layer (layer=)"
            )
        example, output = try_network(bundle, self.train)
        chosen = (self.heads, kind, self.loss, settings.seed)
        self.tasks = new_heads(bundle.network, example, *chosen, output=output) if self.heads else {}
        self.closed_form = bool(self.tasks) and settings.kind != "residual"
        if self.tasks and settings.kind == "deep":
            self._check_room(output.features.nbytes + (2 * len(self.tasks) + 1) * example.nbytes)
        _check_measurement(len(self.grid), settings.measure_images, self.closed_form)
        self.score = self._score()
        # the latent of a mirrored image is not the mirrored latent
        flip = settings.flip and bundle.data_range is not None and len(bundle.image_shape) == 3
        self.batches = Batches(self.train, bundle.schedule, settings.batch_size, settings.seed, flip)
        self.reports: Mapping[str, FitReport] = {}  # of a closed-form fit, once it is done
        self.interpolation_errors: dict[str, float] = {}  # of the numbers per time, once they are measured

    def _check_room(self, each: int) -> None:
        """Refuse hidden layers whose features, so many bytes an image, cannot all be kept."""
        room = CACHE_BYTES * accelerator().num_processes // each
        if batch_count(self.settings.images, self.settings.batch_size) * self.settings.batch_size > room:
            raise TrainingError(
                f"hidden layers train on the features of whole images, and there is room for those of {room}; use "
                f"fewer images, or kind timed"
            )

    def _told(self, part: Part, name: str) -> Part:
        generator = step_generator(self.settings.seed, f"empty condition of {name}", 0)
        return told_to(self.bundle, part, self.settings.empty_share, generator)

    @property
    def calibrated(self) -> list[str]:
        """The heads, old and new, that will be compared with held-out images."""
        return [name for name in dict.fromkeys((*self.bundle.heads, *self.tasks)) if of_head(name).has_posterior]

    @property
    def evaluations(self) -> int:
        """The number of network evaluations, counted per image."""
        return evaluations(self)

    def estimate(self) -> FitEstimate:
        """Estimate the cost of the fit: evaluations, time, and memory for features. It times a batch now."""
        return estimate(self, CACHE_BYTES)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the resulting bundle."""
        options = {"kind": self.settings.kind, **self._history(), "measure_images": self.settings.measure_images}
        return fit_identity(self.bundle, self.heads, self.train, self.test, self.grid, options)

    def __str__(self) -> str:
        bundle, settings, there = self.bundle, self.settings, len(self.train)
        asked = settings.images if self.closed_form else there
        measured = f"{counted(there, settings.measure_images)} at {len(self.grid)} times"
        return (
            f"fits {', '.join(self.heads) or 'no heads'} of {bundle.name} ({bundle.schedule!r}, predicts "
            f"{bundle.network.parameterisation}) on {counted(there, asked)} of {self.train.name}"
            f"{' by their condition' if isinstance(self.train, Conditioned) else ''}, measures "
            f"{measured if settings.measure_images else 'nothing more'}{LEARNED * bundle.network.learned_range}"
        )

    def run(self, work: Path | None = None, progress: bool = True) -> Bundle:
        """Do the fit.

        work: a directory that keeps what a restart needs; the caller must hold its lock. None keeps nothing.
        """
        # without a directory, what a training keeps goes with the call
        with nullcontext(work) if work is not None else tempfile.TemporaryDirectory() as place:
            bundle, settings = self._fit_heads(Path(place), progress), self.settings
            if settings.measure_images:
                bundle = self._measure(bundle, work, progress)
            count = min(settings.measure_images or settings.images, len(self.train))
            measured = {"data": self.train.checksum, "seed": settings.seed, "images": count}
            bundle = bundle.with_provenance(numbers={**measured, "optcov": version("optcov")})
            bundle = bundle if self.test is None else self._calibrate(bundle, progress)
        return bundle if self.moved_to is None else bundle.with_schedule(self.moved_to)

    def _history(self) -> dict[str, Any]:
        """The settings that change what is fitted."""
        settings = self.settings
        known: dict[str, Any] = {name: getattr(settings, name) for name in ("seed", "flip", "batch_size", "half")}
        known |= {"loss": self.loss, "calibration_samples": settings.calibration_samples}
        if self.closed_form:
            return known | {"samples": settings.images, "time_weighted": settings.time_weighted}
        if not self.tasks:
            return known
        known |= {"steps": settings.steps, "learning_rate": settings.learning_rate}
        known |= {"paper_exact": settings.paper_exact, "score": None, "checkpoint_every": None}
        known |= mixed_precision(accelerator())
        if self.score is not None:  # else these change nothing
            known |= {"score": asdict(self.score.settings), "checkpoint_every": settings.checkpoint_every}
        return known

    def _fit_heads(self, place: Path, progress: bool) -> Bundle:
        bundle, settings, history = self.bundle, self.settings, self._history() | {"data": self.train.checksum}
        if self.closed_form:
            with torch.no_grad(), watch_passes("heads", show=progress) as note:
                options = (settings.images, self.loss, settings.time_weighted, note)
                try:
                    done = fit_closed_form(bundle.network, self.tasks, self.batches, *options)
                except BundleError as error:  # of the numbers per time
                    raise TrainingError(
                        f"{bundle.name} returns NaN, infinity or numbers beyond all bounds at some times ({error}); "
                        f"check the scale of its input, and its precision"
                    ) from error
            self.reports = done.reports
            bundle = bundle.with_numbers(done.numbers)
            history |= {"images": min(settings.images, len(self.train))}
        elif self.tasks:
            history |= self._train(place, progress)
        if not self.tasks:
            return bundle
        history |= {"kind": settings.kind, "names": self.heads, "optcov": version("optcov")}
        fitted = {name: task.module for name, task in self.tasks.items()}
        sections = {"heads": history, "earlier heads": _histories_that_stay(bundle, self.heads)}
        return bundle.with_heads(fitted, bundle.fingerprint).with_provenance(**sections)

    def _train(self, place: Path, progress: bool) -> dict[str, Any]:
        """Train residual heads, and return every setting of the training."""
        settings = self.settings
        config = TrainingConfig(
            steps=settings.steps,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            warmup=min(1000, settings.steps // 10),
            decay="constant",
            ema=0.9999,
            seed=settings.seed,
            checkpoint_every=settings.checkpoint_every,
        )
        score = None if self.score is None else asdict(self.score.settings)
        identity = {"data": self.train.checksum, "flip": settings.flip, "score": score}
        records = train_heads(
            self.bundle.network,
            self.tasks,
            self.batches,
            config,
            place / "training",
            self.loss,
            settings.paper_exact,
            identity,
            self.score,
        )
        for _ in track_training(records, config.steps, "stage 2", show=progress):
            pass
        return {**asdict(config), **identity, "dropout": settings.paper_exact}

    def _score(self) -> SampleScore | None:
        """What judges heads by samples: those of the method that uses the first head."""
        settings = self.settings
        if not settings.score_samples or not self.tasks:
            return None
        images = self.train.source if isinstance(self.train, Conditioned) else self.train
        if not isinstance(images, ImageSet):
            raise TrainingError("samples are scored by features of 8-bit images; give such images, or no score")
        method = of_head(next(iter(self.tasks))).rows[0].name
        headed = self.bundle.with_heads(
            {name: task.module for name, task in self.tasks.items()}, self.bundle.fingerprint
        )
        wanted = ScoreSettings(
            settings.score_samples, settings.score_steps, method, settings.score_features, settings.seed
        )
        return SampleScore(headed.network, images, wanted, self.train)

    def _measure(self, bundle: Bundle, work: Path | None, progress: bool) -> Bundle:
        settings, native = self.settings, bundle.network.native_schedule
        options = (settings.measure_images, settings.batch_size, settings.seed, work)
        meter = SpectrumMeter(bundle.image_shape, bundle.heads)
        records = measure(bundle.network, self.train, self.grid, *options, rotate=True, meter=meter)
        shown = track(records, len(self.grid), "numbers and spectra per time", "times", show=progress)
        numbers = smoothed(numbers_per_time(shown), native)
        names = ("mean_square_noise", "mean_square_residual")
        self.interpolation_errors = {name: interpolation_error(numbers, native, name) for name in names}
        return bundle.with_numbers(numbers).with_spectra(meter.spectra(native))

    def _calibrate(self, bundle: Bundle, progress: bool) -> Bundle:
        assert self.test is not None
        if not self.calibrated:
            return bundle.with_provenance(calibration={})
        samples, seed = self.settings.calibration_samples, self.settings.seed + 1
        with watch_passes("calibration", show=progress) as note:
            found = calibrate(bundle.network, self.test, self.calibrated, samples, seed=seed, progress=note)
        return bundle.with_provenance(calibration={name: result.to_json() for name, result in found.items()})


def fit(
    model: Model,
    data: Any,
    *,
    heads: Sequence[str] = ("sn", "npr"),
    condition: Mapping[str, Tensor] | None = None,
    images: int = 4096,
    seed: int = 0,
    schedule: str | Schedule | None = None,
    layer: str | None = None,
    work: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> Bundle:
    """Fit heads on a frozen model, measure its numbers per time, and calibrate the heads.

    model: one of these. A diffusers pipeline (DDPM, DDIM, LDM, DiT, Stable Diffusion, PixArt, SD3, Flux). The directory
    of a pipeline, a bundle or an `optcov train` run. A Bundle. A tuple (network, schedule or scheduler[,
    prediction_type]) with any module or function. A denoiser D(x, sigma). A network in memory is shared with the
    bundle. Its weights do not change, but the fit freezes them and leaves the network in eval mode.
    data: images as a path, a tensor (n, C, H, W) in [-1, 1] or uint8, or a tuple (images, labels), (images, captions)
    or (images, condition). For a model of latents, 8-bit images are encoded, and floating-point tensors are taken as
    latents. The calibration uses the test part of the data; if there is none, a tenth of the data is held out for it.
    heads: their names. () fits no heads, and only measures the numbers per time and the spectra.
    condition: further inputs of the network by name, each a tensor with one entry per image.
    images: how many images a closed-form fit uses.
    layer: the name of the output layer, if the model is a module of your own.
    work: a directory that keeps what is done. The same call with the same directory resumes a fit that was stopped.
    progress: show a bar with the remaining time, on a terminal.
    settings: further fields of `FitSettings`, such as batch_size=64.

    >>> import torch
    >>> from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    >>> blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    >>> unet = UNet2DModel(8, 1, 1, block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, **blocks)
    >>> images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    >>> quick = {"images": 16, "measure_images": 2, "times": 3, "calibration_samples": 0}
    >>> bundle = fit(DDPMPipeline(unet, DDPMScheduler()), images, **quick)
    >>> bundle.sample(2, method="NPR-DDIM", steps=3).shape
    torch.Size([2, 1, 8, 8])
    """
    kept = None if work is None else check_path(work)  # refused before anything is opened
    options = FitSettings.of({"images": images, "seed": seed, **settings})
    cache = None if kept is None else kept / LATENTS
    with unless_refused(cache):
        plan = FitPlan(model, data, heads, options, schedule, condition, layer, cache, progress)
    if kept is None:
        return plan.run(None, progress)
    with directory_lock(kept) if this_process().is_main_process else nullcontext():
        remember(kept / "run.json", plan.identity, kept)
        return plan.run(kept, progress)


def _histories_that_stay(bundle: Bundle, fitted: Sequence[str]) -> dict[str, Any]:
    """How heads were fitted that a fit of others leaves as they are, by head."""
    earlier, last = (bundle.provenance.get(section) for section in ("earlier heads", "heads"))
    names = last.get("names") if isinstance(last, Mapping) else None
    known = {
        **(earlier if isinstance(earlier, Mapping) else {}),
        **dict.fromkeys(names if isinstance(names, list | tuple) else (), last),
    }
    return {name: how for name, how in known.items() if name in bundle.heads and name not in fitted}


def _names(heads: Any) -> tuple[str, ...]:
    """Heads by name, each once."""
    names = (heads,) if isinstance(heads, str) else tuple(heads) if isinstance(heads, Iterable) else (heads,)
    if not all(isinstance(name, str) for name in names):
        raise TrainingError(f"heads = {heads!r:.80} is not a list of names; pass one such as ('sn', 'npr')")
    return tuple(dict.fromkeys(names))


def _check_measurement(times: int, images: int, closed_form: bool) -> None:
    if images == 1 or (images == 0 and not closed_form):
        raise TrainingError(
            f"the numbers per time cannot be measured on {images} images; use measure_images of 2 or more"
            f"{'' if images else ' (only a closed-form fit gathers them from its own samples)'}"
        )
    if images and times < 3:
        raise TrainingError(f"{times} times are too few to judge an interpolation; use 3 times or more")
