"""Images in a directory: what is missing of them is drawn, shared among the processes of Accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from optcov.bundle.sampler import Sampler
from optcov.data import to_8bit
from optcov.data.sample_directory import SampleDirectory
from optcov.processes import this_process
from optcov.progress import track
from optcov.storage import directory_lock


@final
@dataclass(frozen=True)
class DrawnFiles:
    """What `draw_to` did."""

    directory: SampleDirectory
    settings: Mapping[str, Any]  # what determines the images
    drawn: int  # images that were missing
    evaluations: float | None  # of the network per image, of this process; None if it drew nothing


def draw_to(
    sampler: Sampler,
    directory: Path,
    n: int,
    batch_size: int = 64,
    file_format: str = "png",
    condition_rule: Mapping[str, Any] | None = None,
) -> DrawnFiles:
    """Draw what is missing of the first n images.

    condition_rule: how the condition follows from an image's number. It is kept instead of the condition itself, so
    that more images may be drawn later.
    """
    state, settings = this_process(), {**sampler.settings(), **sampler.bundle.decoder_identity()}
    if condition_rule:
        settings["condition"] = dict(condition_rule)
    evaluations, drawn_here = 0.0, 0
    with directory_lock(directory) if state.is_main_process else nullcontext():
        files = SampleDirectory(directory, settings, file_format)
        missing = files.missing(n)
        state.wait_for_everyone()  # nobody draws before everybody has seen what is missing
        rank, ranks = state.process_index, state.num_processes
        share = missing[len(missing) * rank // ranks : len(missing) * (rank + 1) // ranks]

        def batches() -> Iterator[list[int]]:
            nonlocal evaluations, drawn_here
            for start in range(0, len(share), batch_size):
                indices = list(share[start : start + batch_size])
                drawn = sampler.draw(indices)
                files.save(to_8bit(sampler.bundle.as_images(drawn.x_0)), indices)
                evaluations, drawn_here = evaluations + float(drawn.evaluations.sum()), drawn_here + len(indices)
                yield indices

        for _ in track(batches(), len(share), sampler.title, "images", len, show=state.is_main_process):
            pass
        state.wait_for_everyone()
    return DrawnFiles(files, settings, len(missing), evaluations / drawn_here if drawn_here else None)
