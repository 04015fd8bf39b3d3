"""What tables measure of a bundle, cell by cell: distances of samples, likelihoods, the cost of an evaluation."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import final

from optcov.bundle import Bundle, BundleError
from optcov.checkpoints import SOURCES
from optcov.experiments.tables.cells import Cell, Result
from optcov.experiments.tables.cost import compute_cost
from optcov.experiments.tables.drawing import compute_distance
from optcov.experiments.tables.images import TableImages
from optcov.experiments.tables.published import (
    SETTING_OF_SCHEDULE,
    distance_steps,
    paper_images,
    published,
)
from optcov.experiments.tables.reference import Reference
from optcov.experiments.tables.scoring import compute_likelihood, rows_by_covariance
from optcov.experiments.tables.sizes import TableSize
from optcov.experiments.timing import device_name
from optcov.methods import FEW_STEP_METHODS, METHODS, PEER_METHODS, find_method, unknown_method
from optcov.metrics import Extractor
from optcov.metrics.extractors import FID
from optcov.metrics.frechet import Features
from optcov.metrics.kernel import KernelSide, rows_of
from optcov.metrics.sources import check_draws_images
from optcov.schedule import Schedule
from optcov.solvers import few_step_times
from optcov.solvers.multistep import ETA

OWN = "own"  # the schedule that a bundle was trained on
LEAST_STEPS = 2  # of a trajectory


@final
class Evaluation:
    """A bundle with the images and the size of its tables; makes cells and computes them."""

    def __init__(
        self,
        bundle: Bundle,
        images: TableImages,
        extractor: Extractor | None,
        size: TableSize,
        *,
        schedules: Sequence[str] | None = None,
        reference: str | None = None,
        paper: str | None = None,
        methods: Sequence[str] | None = None,
        steps: Sequence[int] | None = None,
        seed: int = 0,
        batch_size: int = 64,
    ):
        if images.test.shape != tuple(bundle.image_shape):
            raise ValueError(
                f"{images.name} has images of shape {images.test.shape}, but {bundle.name} needs {bundle.image_shape}"
            )
        if extractor is not None:
            extractor.check(bundle.image_shape, bundle.name)
            check_draws_images(bundle)
        self.bundle, self.images, self._extractor, self.size = bundle, images, extractor, size
        self.seed, self.batch_size = seed, batch_size
        self._methods = None if methods is None else {row_name(name) for name in methods}
        self._steps = None if steps is None else sorted(set(steps))
        self._paper = paper
        self.schedules = tuple(schedules or (size.schedules if serves_all_schedules(bundle.schedule) else (OWN,)))
        self._models: dict[str, Bundle] = {}
        for name in self.schedules:
            self.bundle_on(name)
        compared = size.reference_images or paper_images(self.paper_setting(self.schedules[0]), "reference_images") or 0
        self.reference = Reference(images, compared, reference)

    @property
    def extractor(self) -> Extractor:
        """What distances are measured by; tables without distances need none."""
        if self._extractor is None:
            raise ValueError("a table of distances needs a feature extractor; choose one by --features")
        return self._extractor

    def bundle_on(self, schedule: str) -> Bundle:
        """The bundle at times of a schedule."""
        if schedule not in self._models:
            if schedule not in (OWN, *SETTING_OF_SCHEDULE):
                raise ValueError(f"unknown schedule {schedule!r}; choose {', '.join(SETTING_OF_SCHEDULE)} or {OWN}")
            own = schedule in (OWN, self.bundle.schedule.name)
            self._models[schedule] = self.bundle if own else self.bundle.with_schedule(schedule)
        return self._models[schedule]

    @property
    def discrete_schedules(self) -> list[str]:
        """Those with a finite number of steps."""
        return [name for name in self.schedules if self.bundle_on(name).schedule.discrete]

    def paper_setting(self, schedule: str) -> str | None:
        """The paper's setting that a schedule's numbers are put beside; that of its own networks by their name."""
        own = SOURCES.get(self.bundle.name) if schedule == OWN else None
        return self._paper or (own.title if own else SETTING_OF_SCHEDULE.get(schedule))

    @property
    def paper_caveat(self) -> tuple[str, ...]:
        """What to know of the paper's numbers beside ours, if there are any and the network is not the paper's."""
        if self.bundle.name in SOURCES or not any(self.paper_setting(name) for name in self.schedules):
            return ()
        return ("The paper's numbers are of other networks, and of their data: compare orderings, not values.",)

    def names(self, method: str) -> bool:
        """Whether a row was asked for by its name."""
        return self._methods is not None and method in self._methods

    def wants(self, method: str) -> bool:
        """Whether a row was asked for; all were if none was named."""
        return self._methods is None or method in self._methods

    def check_rows(self, rows: Sequence[str]) -> None:
        """Refuse a row that was asked for and that the table does not have, before anything is computed."""
        for name in sorted(self._methods or ()):
            if name not in rows:
                raise ValueError(f"{name} is no row of this table; choose among: {'; '.join(dict.fromkeys(rows))}")

    @property
    def chose_steps(self) -> bool:
        """Whether numbers of steps were asked for."""
        return self._steps is not None

    def distance_steps(self, schedule: str) -> list[int]:
        """Numbers of steps K of the tables of distances that a schedule allows."""
        limit = self.bundle_on(schedule).schedule.grid_size
        usual = self.size.steps or distance_steps(self.paper_setting(schedule))
        return self._allowed_steps(usual, limit, f"drawn by the {limit} times of {schedule}")

    def likelihood_steps(self, times: int) -> list[int]:
        """Numbers of steps K to show of a sweep over so many times."""
        return self._allowed_steps(self.size.likelihood_steps, times, f"scored on {times} times")

    def _allowed_steps(self, usual: Sequence[int], limit: int, what: str) -> list[int]:
        """The usual K that fit, or those that were asked for, which all must."""
        shown = self._steps or [K for K in usual if limit >= K]
        wrong = [K for K in shown or usual if not LEAST_STEPS <= K <= limit]
        if wrong:
            raise ValueError(f"K = {wrong[0]} cannot be {what}; choose K of at least {LEAST_STEPS} and at most {limit}")
        return shown

    def obstacle(self, schedule: str, method: str) -> str | None:
        """Why a method cannot run, or None."""
        row = find_method(method)
        if row.eta is None:
            fits = not row.continuous or serves_all_schedules(self.bundle_on(schedule).schedule)
            return None if fits else f"{method} reverses the VP SDE, which {schedule} is not"
        try:
            self.bundle_on(schedule).reverse_process(row)
        except BundleError as error:
            return str(error)
        return None

    def distance_cell(
        self,
        schedule: str,
        method: str,
        steps: int,
        *,
        times: Sequence[float] | None = None,
        tolerance: float | None = None,
    ) -> Cell:
        """Distance of images that a method draws; times: of its trajectory, even ones by default."""
        on_schedule = self.bundle_on(schedule).schedule
        settings = {
            "model": self.identity,
            "schedule": on_schedule.digest(),
            "schedule_name": schedule,
            "method": method,
            "convention": find_method(method).convention,
            "steps": steps,
            "times": None if times is None else list(times),
            "tolerance": tolerance,
            "noise_cap": self.bundle.noise_cap(method),
            "samples": self.size.samples,
            "seed": self.seed,
            "features": self.extractor.identity,
            "reference": self.reference.identity,
            **({"labels": "in turn"} if self.bundle.classes else {}),
        }
        if method in FEW_STEP_METHODS:
            settings["few_steps"] = [ETA, *few_step_times(on_schedule, steps, self.bundle.image_shape).times]
        how = f"K = {steps}" if tolerance is None else f"tolerance {tolerance}"
        label = f"{method}, {how}{', OT' if times is not None else ''} ({schedule})"
        return Cell("distance", settings, float(steps * self.size.samples), label)

    def likelihood_cell(self, schedule: str, seed: int | None = None, choose: bool = True) -> Cell:
        """Bits/dim of all covariances; choose: with optimal trajectories, which takes a sweep of training images.

        seed: None scores the first test images; a number chooses them, and their noise, by it.
        """
        size, model = self.size, self.bundle_on(schedule)
        scored = size.images or (len(self.images.test) if seed is None else published("repeats")["images"])
        images = min(scored, len(self.images.test))
        present = len(self.images.train)
        wanted = size.train_images or paper_images(self.paper_setting(schedule), "trajectory_images") or present
        train_images = min(wanted, present) if choose else 0
        times = min(size.times, model.schedule.grid_size) or model.schedule.grid_size
        settings = {
            "model": self.identity,
            "schedule": model.schedule.digest(),
            "schedule_name": schedule,
            "images": images,
            "train_images": train_images,
            "times": times,
            # a choice among the usual K does not sweep again; others do
            "lengths": sorted({K for K in size.likelihood_steps if times >= K} | set(self.likelihood_steps(times)))
            if choose
            else [times],
            "noise_seed": self.seed if seed is None else seed,
            "image_seed": seed,
            "test": self.images.test.checksum,
            "train": self.images.train.checksum if choose else None,
            **({"labels": "their own"} if self.bundle.classes and self.images.test.labels is not None else {}),
        }
        repeat = "" if seed is None else f", seed {seed}"
        return Cell("likelihood", settings, float(times * (images + train_images)), f"bits/dim ({schedule}{repeat})")

    def cost_cell(self) -> Cell:
        """Size and time of an evaluation, with each head and without."""
        device = device_name(next(self.bundle.unet.parameters()).device)
        settings = {"model": self.identity, "batch": 10, "rounds": self.size.timing_rounds, "device": device}
        heads = len(self.bundle.heads)
        return Cell("cost", settings, float(10 * (self.size.timing_rounds + 1) * (1 + heads)), "cost of an evaluation")

    def compute(self, cell: Cell, scratch: Path) -> Generator[float, None, Result]:
        """Compute a cell in parts."""
        if cell.kind == "distance":
            return compute_distance(
                self.bundle_on(cell.settings["schedule_name"]),
                self.extractor,
                self.reference_features,
                self.reference_kernel,
                cell.settings,
                scratch,
                self.batch_size,
            )
        if cell.kind == "likelihood":
            model = self.bundle_on(cell.settings["schedule_name"])
            return compute_likelihood(model, self.images, cell.settings, scratch, self.batch_size, self.identity)
        if cell.kind == "cost":
            return compute_cost(self.bundle, cell.settings)
        raise ValueError(f"unknown kind of cell {cell.kind!r}")

    @cached_property
    def identity(self) -> str:
        """Of the whole bundle: weights, heads, numbers per time, and what they mean."""
        return model_identity(self.bundle)

    @cached_property
    def reference_features(self) -> Features:
        """What samples are compared with, by the extractor."""
        return self.reference.features(self.extractor)

    @cached_property
    def reference_kernel(self) -> KernelSide | None:
        """What samples of FID are compared with for KID; None for other features, or statistics without any."""
        rows = rows_of(self.reference_features) if self.extractor.distance.startswith(FID) else None
        return None if rows is None else KernelSide.of(rows)


def model_identity(bundle: Bundle) -> str:
    """What the cells and tables of a bundle are known by."""
    return bundle.digest()[:32]


def serves_all_schedules(schedule: Schedule) -> bool:
    """Whether a network of this schedule serves linear, cosine and VP SDE: it takes real times, and has all levels."""
    return not schedule.discrete and schedule.preserves_variance


def row_name(name: str) -> str:
    """A row of some table as it is spelt there; upper and lower case are the same."""
    rows = dict.fromkeys([*METHODS, *FEW_STEP_METHODS, *PEER_METHODS, *rows_by_covariance().values()])
    for known in rows:
        if known.lower() == name.strip().lower():
            return known
    raise unknown_method(name, list(rows))
