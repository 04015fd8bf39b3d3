"""Training: stage 1 (the noise predictor), stage 2 (its heads), the closed-form fit, and numbers per time."""

from optcov.fitting.batches import Batch, Batches, Conditioned
from optcov.fitting.calibration import calibrate
from optcov.fitting.config import TrainingConfig, TrainingError
from optcov.fitting.heads import new_heads
from optcov.fitting.loop import Training
from optcov.fitting.measure import interpolation_error, measure, numbers_per_time, time_grid
from optcov.fitting.objectives import HeadObjective, JointObjective, NoiseObjective
from optcov.fitting.stage1 import DiTShape, UNetShape, train_noise_predictor
from optcov.fitting.stage2 import fit_closed_form, train_heads

__all__ = [
    "Batch",
    "Batches",
    "Conditioned",
    "DiTShape",
    "HeadObjective",
    "JointObjective",
    "NoiseObjective",
    "Training",
    "TrainingConfig",
    "TrainingError",
    "UNetShape",
    "calibrate",
    "fit_closed_form",
    "interpolation_error",
    "measure",
    "new_heads",
    "numbers_per_time",
    "time_grid",
    "train_heads",
    "train_noise_predictor",
]
