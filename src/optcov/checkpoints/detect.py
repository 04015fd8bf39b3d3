"""What a name given by a user is: a file of the paper's networks, a directory of diffusers, or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from optcov.checkpoints.diffusers_models import import_diffusers, is_diffusers
from optcov.checkpoints.errors import CheckpointError, naming
from optcov.checkpoints.models import ImportedModel, import_checkpoint

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")


def import_model(
    source: str | Path, name: str | None = None, *, image_size: int | None = None, **options: Any
) -> ImportedModel:
    """Import whatever the source is; the options are those of `import_checkpoint`.

    All but image_size belong to the paper's networks and are refused for a model of diffusers.
    """
    path = Path(source)
    with naming(path):
        on_hub = not path.exists() and path.suffix not in _FILES and _HUB_NAME.fullmatch(str(source)) is not None
        if not on_hub and not (path.is_dir() and is_diffusers(path)):
            return import_checkpoint(path, name, image_size=image_size, **options)
        given = [option for option, value in {"as": name, **options}.items() if value is not None]
        if given:
            raise CheckpointError(f"it is a model of diffusers, which says all that itself; leave out --{given[0]}")
        return import_diffusers(source, image_size)
