"""Scoring: the variational bound by named terms, the sweep that prices every step at once, and the ODE likelihood."""

from optcov.likelihood.classes import Classification, class_bounds
from optcov.likelihood.costs import CostTable
from optcov.likelihood.discretised import discretised_log_prob
from optcov.likelihood.elbo import ElboTerms, elbo
from optcov.likelihood.ode import ode_likelihood
from optcov.likelihood.statistics import Estimate, estimate, paired_difference
from optcov.likelihood.sweep import Sweep, cost_table, merge, merge_processes
from optcov.likelihood.table import LikelihoodRow, even_on_grid, fitting_lengths, likelihood_table, pool_repeats

__all__ = [
    "Classification",
    "CostTable",
    "ElboTerms",
    "Estimate",
    "LikelihoodRow",
    "Sweep",
    "class_bounds",
    "cost_table",
    "discretised_log_prob",
    "elbo",
    "estimate",
    "even_on_grid",
    "fitting_lengths",
    "likelihood_table",
    "merge",
    "merge_processes",
    "ode_likelihood",
    "paired_difference",
    "pool_repeats",
]
