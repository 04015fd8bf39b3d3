"""The place of a fit: the bundle that it writes, and beside it, while it lasts, what a restart needs.

OUT         the bundle, whole or absent; its history says by which fit it was made
OUT.work    run.json with the identity of the fit, and what is done of it; removed once the bundle is there
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from optcov import storage
from optcov.bundle import Bundle
from optcov.bundle.saving import CONFIG, PROVENANCE
from optcov.fitting.batches import condition_entry
from optcov.fitting.conditions import Part
from optcov.fitting.config import TrainingError
from optcov.identity import changes, check_unchanged, digest_numbers, images_identity, known_by
from optcov.processes import this_process

if TYPE_CHECKING:
    from optcov.fitting.fit import FitPlan

RECORD = "fit"  # section of a bundle's history


def fit_identity(
    bundle: Bundle,
    fitted: Collection[str],
    train: Part,
    held_out: Part | None,
    times: Tensor,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """All that determines the bundle that a fit writes: of its source all but what is fitted anew."""
    kept = [name for name in bundle.heads if name not in fitted]
    identity = {name: entry for name, entry in bundle.identity(kept).items() if name not in ("numbers", "spectra")}
    return {
        **identity,
        "fitted heads": sorted(fitted),
        "images": images_identity(train),
        "condition": condition_entry(train),
        "held-out images": None if held_out is None else images_identity(held_out),
        **({} if held_out is None or (told := condition_entry(held_out)) is None else {"held-out condition": told}),
        "times": known_by(digest_numbers(times), len(times)),
        **options,
    }


@final
class FitRun:
    """A fit on its way to a bundle; refuses at once to replace another one.

    overwrite: replace the bundle that is there, or the unfinished fit.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], overwrite: bool = False):
        self.out, self.identity = Path(out), dict(identity)
        self.work = self.out.with_name(f"{self.out.name}.work")
        self._record = self.work / "run.json"
        self.finished = not overwrite and self._check_bundle()
        if not overwrite and not self.finished and self._record.exists():
            remedy = "undo that to go on with it, or give --overwrite to start anew"
            check_unchanged(self._before(), self.identity, self.work, TrainingError, remedy=remedy)

    @property
    def resumes(self) -> bool:
        """Whether an earlier run of this very fit was stopped."""
        return self._record.exists() and not changes(self._before(), self.identity)

    def write(self, plan: FitPlan) -> Bundle:
        """Run the fit and write its bundle, on one of several processes for all; a stopped one goes on."""
        state = this_process()
        with storage.directory_lock(self.work) if state.is_main_process else nullcontext():
            if state.is_main_process and not self.resumes:
                self._clear()
                storage.write_json(self._record, self.identity)
            state.wait_for_everyone()  # nobody looks for what is kept before what is not is gone
            bundle = plan.run(self.work).with_provenance(**{RECORD: self.identity})
            if state.is_main_process:
                bundle.save(self.out)
                shutil.rmtree(self.work, ignore_errors=True)
        return bundle

    def clean(self) -> None:
        """Remove what only a restart of a finished fit would need, unless another process fits it again just now."""
        if this_process().is_main_process and self.work.is_dir():
            with storage.directory_lock(self.work):
                shutil.rmtree(self.work, ignore_errors=True)

    def _check_bundle(self) -> bool:
        """Whether this very fit is there already; an error if another bundle is."""
        if not (self.out / CONFIG).exists():
            return False
        path = self.out / PROVENANCE
        history = storage.read_json(path) if path.exists() else {}
        before = history.get(RECORD) if isinstance(history, dict) else None
        if not isinstance(before, dict):
            raise TrainingError(
                f"{self.out} holds a bundle already; give --overwrite to replace it, or another directory by --out"
            )
        changed = changes(before, self.identity)
        if changed:
            raise TrainingError(
                f"{self.out} holds the bundle of another fit ({', '.join(changed[:3])}); give --overwrite to replace "
                f"it, or another directory by --out"
            )
        return True

    def _before(self) -> dict[str, Any]:
        before = storage.read_json(self._record)
        if not isinstance(before, dict):
            raise TrainingError(f"{self._record} does not describe a fit; remove {self.work} to start anew")
        return before

    def _clear(self) -> None:
        for path in self.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()
