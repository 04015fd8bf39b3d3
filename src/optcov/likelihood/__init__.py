"""Scoring: the variational bound by named terms, the sweep that prices every step at once, and the ODE likelihood."""

from optcov.likelihood.costs import CostTable
from optcov.likelihood.discretised import discretised_log_prob
from optcov.likelihood.elbo import ElboTerms, elbo
from optcov.likelihood.ode import OdeLikelihood, ode_likelihood
from optcov.likelihood.statistics import Estimate, estimate, paired_difference
from optcov.likelihood.sweep import ImageSource, Sweep, SweepProgress, cost_table, merge

__all__ = [
    "CostTable",
    "ElboTerms",
    "Estimate",
    "ImageSource",
    "OdeLikelihood",
    "Sweep",
    "SweepProgress",
    "cost_table",
    "discretised_log_prob",
    "elbo",
    "estimate",
    "merge",
    "ode_likelihood",
    "paired_difference",
]
