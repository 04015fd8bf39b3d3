"""Foreign checkpoints: the paper's six networks, the authors' heads, diffusers' models. Strict both ways."""

from optcov.checkpoints.diffusers_models import import_diffusers, import_model
from optcov.checkpoints.errors import CheckpointError
from optcov.checkpoints.models import ImportedModel, export_checkpoint, import_checkpoint, read_gamma
from optcov.checkpoints.sources import SOURCES

__all__ = [
    "SOURCES",
    "CheckpointError",
    "ImportedModel",
    "export_checkpoint",
    "import_checkpoint",
    "import_diffusers",
    "import_model",
    "read_gamma",
]
