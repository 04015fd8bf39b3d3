"""Scoring: the variational bound by named terms, the sweep that prices every step at once, and the ODE likelihood."""

from optcov.likelihood.discretised import discretised_log_prob
from optcov.likelihood.elbo import ElboTerms, elbo
from optcov.likelihood.statistics import Estimate, estimate, paired_difference

__all__ = [
    "ElboTerms",
    "Estimate",
    "discretised_log_prob",
    "elbo",
    "estimate",
    "paired_difference",
]
