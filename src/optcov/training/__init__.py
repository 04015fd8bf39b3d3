"""Training: stage 1 (the noise predictor), stage 2 (its heads), the closed-form fit, and numbers per time."""

from optcov.training.batches import Batch, Batches, Source
from optcov.training.calibration import Calibration, calibrate
from optcov.training.config import TrainingConfig, TrainingError
from optcov.training.heads import new_heads
from optcov.training.loop import StepRecord, Training
from optcov.training.measure import TimeRecord, gather, interpolation_error, measure, time_grid
from optcov.training.objectives import HeadObjective, JointObjective, NoiseObjective
from optcov.training.stage1 import UNetShape, train_noise_predictor
from optcov.training.stage2 import HeadFit, fit_closed_form, train_heads
from optcov.training.targets import HeadTask

__all__ = [
    "Batch",
    "Batches",
    "Calibration",
    "HeadFit",
    "HeadObjective",
    "HeadTask",
    "JointObjective",
    "NoiseObjective",
    "Source",
    "StepRecord",
    "TimeRecord",
    "Training",
    "TrainingConfig",
    "TrainingError",
    "UNetShape",
    "calibrate",
    "fit_closed_form",
    "gather",
    "interpolation_error",
    "measure",
    "new_heads",
    "time_grid",
    "train_heads",
    "train_noise_predictor",
]
