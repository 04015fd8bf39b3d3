"""Training: stage 1 (the noise predictor), stage 2 (its heads), the closed-form fit, and numbers per time."""
