"""Which noise belongs beside an extrapolated mean: what keeps the variance of x_s right, from a bundle's own numbers.

    python benchmarks/extrapolated_noise.py [--bundle fashion] [--schedule linear] [--steps 5 10 25] [--record FILE]

Let x_u, x_t come from the forward process with eta = 1, the network's means be right, v_t = E Var[x_0 | x_t], and
d = x0_hat_t - x0_hat_u. x0_hat is a martingale, so that E d^2 = v_u - v_t = Cov(x0_hat_t, d), and Cov(x_t, d) = g v_u,
g the clean weight of the bridge from u to t. The mean gamma (x0_hat_t + w d) + kappa x_t then lacks, beside lambda^2,

    gamma^2 (v_t - (2 w + w^2) (v_u - v_t)) - 2 gamma kappa w g v_u

of the variance that x_s has. For w = 0 that is gamma^2 v_t, the optimal covariance. A negative number says that the
extrapolated mean varies too much already. Needs no network evaluation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import optcov
from optcov import ForwardProcess, Schedule
from optcov.solvers import few_step_times
from optcov.solvers.multistep import extrapolation


def lacking(schedule: Schedule, u: float, t: float, s: float, v: Callable[[float], float]) -> dict[str, float]:
    """What the step from t to s lacks, as a share of gamma^2 v_t and of lambda^2."""
    forward = ForwardProcess(schedule, 1.0)
    bridge, w = forward.bridge(t, s), float(extrapolation(schedule, u, t, s))
    gamma, kappa, own = float(bridge.clean_weight), float(bridge.noisy_weight), float(bridge.variance)
    before = float(forward.bridge(u, t).clean_weight)
    variance = gamma**2 * (v(t) - (2 * w + w**2) * (v(u) - v(t))) - 2 * gamma * kappa * w * before * v(u)
    return {
        "t": t,
        "w": w,
        "variance": variance,
        "of gamma^2 v": variance / (gamma**2 * v(t)),
        "of lambda^2": variance / own,
    }


def main() -> None:
    """Print a line per step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", default="fashion")
    parser.add_argument("--schedule", default="linear")
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 10, 25])
    parser.add_argument("--record", type=Path, help="a file for lines of JSON")
    options = parser.parse_args()
    bundle = optcov.load(options.bundle, schedule=options.schedule)
    schedule, numbers = bundle.schedule, bundle.per_time("mean_square_residual")

    def v(t: float) -> float:
        return float(schedule.beta_bar(t) / schedule.alpha_bar(t) * numbers(t))

    lines = []
    for K in options.steps:
        times = few_step_times(schedule, K, bundle.image_shape).times
        print(f"K = {K}:  t, w, what is lacking of gamma^2 v_t, and of lambda^2")
        for s, t, u in reversed(list(zip(times, times[1:], times[2:], strict=False))):
            found = lacking(schedule, u, t, s, v)
            lines.append({"bundle": options.bundle, "steps": K, **{name: round(x, 4) for name, x in found.items()}})
            print(f"{t:8g} {found['w']:6.2f} {found['of gamma^2 v']:+8.2f} {found['of lambda^2']:+9.3f}")
    if options.record:
        options.record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main()
