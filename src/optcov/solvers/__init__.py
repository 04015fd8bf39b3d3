"""Continuous-time baselines of the paper, and diffusers' own schedulers as peers, on the same networks.

Each takes a network, a schedule and the starting noise, and returns a `SolverResult` that counts its network
evaluations (NFE). The solvers of the reverse SDE need `Schedule.vp_sde()`, the probability flow any schedule with real
times, peers a discrete one.
"""

from optcov.solvers.gotta_go_fast import gotta_go_fast
from optcov.solvers.matching import DataMoments, MatchedNoise, match_noise
from optcov.solvers.multistep import BridgeNoise, MultistepNoise, few_step_times, multistep_sample
from optcov.solvers.peers import PEERS, peer
from optcov.solvers.result import SolverResult
from optcov.solvers.reverse_sde import euler_maruyama, probability_flow

__all__ = [
    "PEERS",
    "BridgeNoise",
    "DataMoments",
    "MatchedNoise",
    "MultistepNoise",
    "SolverResult",
    "euler_maruyama",
    "few_step_times",
    "gotta_go_fast",
    "match_noise",
    "multistep_sample",
    "peer",
    "probability_flow",
]
