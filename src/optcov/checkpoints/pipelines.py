"""Pipelines of diffusers whose network is none of images, refused by their name before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optcov.checkpoints.errors import CheckpointError

DECODERS = ("vae", "vqvae", "movq")  # parts of a pipeline that turn latents into images
SUPPORTED = "give a pipeline of an unconditional UNet2DModel, such as DDPMPipeline or DDIMPipeline"


def refuse_other_pipelines(path: Path, index: Any) -> None:
    """Refuse pipelines without a U-Net, and those of latents, whose network has the shape of any other.

    index: the content of model_index.json, or nothing.
    """
    if not isinstance(index, dict):
        raise CheckpointError("model_index.json is not the index of a pipeline")
    kind = f"it is of the class {str(index['_class_name'])[:80]}, which" if "_class_name" in index else "it"
    # a part is a library and a class; [null, null] is one that was left out, and anything else is a setting
    parts = {name for name, part in index.items() if isinstance(part, list) and len(part) == 2 and all(part)}
    there = [name for name in ("unet", *DECODERS) if (path / name / "config.json").is_file()]
    if (path / "config.json").is_file():
        there.append("unet")
    refuse_parts(kind, {*parts, *there})


def refuse_parts(kind: str, parts: set[str]) -> None:
    """Refuse a pipeline by its parts. kind: how a sentence about it begins."""
    if "unet" not in parts:
        others = ", ".join(sorted(parts))[:200]
        raise CheckpointError(f"{kind} has no unet{f' but {others}' if others else ''}; {SUPPORTED}")
    decoder = next((name for name in DECODERS if name in parts), None)
    if decoder is not None:
        raise CheckpointError(
            f"{kind} draws latents that its {decoder} decodes, and the commands know images only; from Python a "
            f"network of latents works with data_range=None (docs/faq.md), or {SUPPORTED}"
        )
