"""The reverse step p(x_s | x_t): a Gaussian made of the network's prediction and the bridge (Eqs. 1, 6).

prediction = network(x_t, t, **condition)           one pass: x0_hat, eps_hat, and the heads' outputs
posterior  = covariance.posterior(prediction)       Gaussian over x_0
anchor     = x_t                                    or the x_t rebuilt from a clipped x_0 and the raw noise
step       = bridge(t, s).apply(posterior, anchor)  Gaussian over x_s: gamma mean + kappa anchor, lam2 I + gamma^2 v
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from optcov.covariances import Bounds, Covariance, Ocm, PerTime, Spectrum, make_covariance
from optcov.forward import Bridge, ForwardProcess
from optcov.gaussian import Gaussian
from optcov.prediction import Network, Prediction, check_condition
from optcov.schedule import Time


@final
@dataclass(frozen=True)
class Step:
    """One step of sampling, as a callback sees it."""

    t: float
    s: float
    x_t: Tensor  # (B, *D)
    gaussian: Gaussian  # over x_s, as it is drawn from: with the noise cap applied, given the history of a solver
    x_s: Tensor  # (B, *D)

    def log_prob(self) -> Tensor:
        """Log-density of x_s in nats, (B,). It exists at eta = 0, too, if v is positive."""
        return self.gaussian.log_prob(self.x_s)


@final
class ReverseProcess:
    """A network, a forward process and a covariance, which together give the reverse step.

    covariance: a name or a covariance object. Names: "beta_tilde" | "beta" | "analytic" | "npr_isotropic" | "sn" |
    "npr" | "ocm" | "range" | "spectral" | "npr_correlated" | "sn_correlated", and the matrix forms "sn_full" |
    "npr_full".
    mean_square_noise, mean_square_residual: numbers per time, which "analytic" and "npr_isotropic" need. Each is a
    tensor of length N + 1, or a callable of t.
    spectrum: needed by "spectral", "npr_correlated" and "sn_correlated". It is a Spectrum, or a callable of t that
    gives powers (*D).
    ocm_probes: probe the network's Jacobian this many times at every step for "ocm", instead of reading a head.

    data_range: x0_hat is clipped to this range, and v to [0, (half its width)^2]. None clips nothing, except that v
    stays at least 0.
    clip_mean: False clips x0_hat in the last step only. v is bounded either way.

    use_clipped_model_output: True computes the noise again from the clipped x0_hat. False keeps the predicted noise
    beside the clipped x0_hat, as the paper's DDIM rows do. None means True if eta = 1, else False.

    >>> import torch
    >>> from optcov import Schedule, oracle
    >>> schedule = Schedule.linear()
    >>> data = oracle.GaussianMixture([0.5, 0.5], [[-1.0], [1.0]], [0.01, 0.01])
    >>> process = ReverseProcess(data.network(schedule), ForwardProcess(schedule), "npr", data_range=None)
    >>> step = process.step(torch.zeros(3, 1, dtype=torch.float64), t=500, s=400)
    >>> step.mean.shape, step.variance.shape
    (torch.Size([3, 1]), torch.Size([3, 1]))
    """

    def __init__(
        self,
        network: Network,
        forward: ForwardProcess,
        covariance: str | Covariance = "npr",
        data_range: tuple[float, float] | None = (-1, 1),
        use_clipped_model_output: bool | None = None,
        clip_mean: bool = True,
        *,
        mean_square_noise: PerTime | None = None,
        mean_square_residual: PerTime | None = None,
        spectrum: Spectrum | Tensor | Callable[[Time], Tensor] | None = None,
        ocm_probes: int | None = None,
    ):
        if not callable(network):
            raise ValueError(
                f"network = {network!r} is not callable; a network is a function (x_t, t) -> NoisePrediction"
            )
        if not isinstance(forward, ForwardProcess):
            raise ValueError(f"forward = {forward!r} is not a ForwardProcess; pass ForwardProcess(schedule, eta)")
        for name, value in (("clip_mean", clip_mean), ("use_clipped_model_output", use_clipped_model_output)):
            if not isinstance(value, bool) and (value is not None or name == "clip_mean"):
                raise ValueError(f"{name} = {value!r} is not a switch; pass True or False")
        numbers = {"mean_square_noise": mean_square_noise, "mean_square_residual": mean_square_residual}
        if ocm_probes is not None:
            if covariance != "ocm":
                raise ValueError(f'ocm_probes belongs to the covariance "ocm", not to {covariance!r:.80}; leave it out')
            covariance = Ocm(ocm_probes)
        self.forward, self.covariance = forward, make_covariance(covariance, numbers, spectrum).bound_to(forward)
        self.given_network = network  # as it was given: `network` may be asked for more, such as probes
        self.network = self.covariance.asking(network, forward)
        self.bounds = Bounds(data_range, clip_mean)  # counts the variances that it moves
        self.use_clipped_model_output = (
            forward.eta == 1 if use_clipped_model_output is None else use_clipped_model_output
        )
        # whether the predicted noise stands beside a clipped x0_hat, as in the paper's DDIM rows
        self.keeps_raw_noise = data_range is not None and clip_mean and not self.use_clipped_model_output

    def for_images(self, seed: int, indices: Sequence[int]) -> ReverseProcess:
        """The process for images with these numbers, for a covariance that draws random probes.

        Both processes share their counts of clipped variances.
        """
        network = self.covariance.asking(self.given_network, self.forward, seed, indices)
        if network is self.given_network:
            return self
        own = copy(self)
        own.network = network
        return own

    @property
    def data_range(self) -> tuple[float, float] | None:
        """The range of the data, or None."""
        return self.bounds.data_range

    def step(self, x_t: Tensor, t: Time, s: Time, **condition: Tensor) -> Gaussian:
        """Gaussian over x_s given x_t (B, *D), for 0 <= s < t."""
        bridge, (signal, spread) = self.forward.bridge(t, s), self.forward.levels(t)
        if not isinstance(x_t, Tensor) or x_t.ndim < 2 or not x_t.is_floating_point():
            raise _not_points(x_t, bridge.variance)
        if bridge.variance.shape not in ((), x_t.shape[:1]):
            raise _not_points(x_t, bridge.variance)
        if condition:
            check_condition(condition, len(x_t))
        prediction = Prediction.of(self.network(x_t, t, **condition), x_t, t, signal, spread).require_finite()
        return self._step(prediction, bridge, s)

    def posterior(self, x_t: Tensor, t: Time, **condition: Tensor) -> Gaussian:
        """Gaussian over x_0 given x_t (B, *D)."""
        return self.posterior_from(self.predict(x_t, t, **condition).require_finite())

    def predict(self, x_t: Tensor, t: Time, **condition: Tensor) -> Prediction:
        """Ask the network about x_t (B, *D), without checking its values."""
        signal, spread = self.forward.levels(t)
        if not isinstance(x_t, Tensor) or x_t.ndim < 2 or not x_t.is_floating_point():
            raise _not_points(x_t, signal)
        if signal.shape not in ((), x_t.shape[:1]):
            raise _not_points(x_t, signal)
        if condition:
            check_condition(condition, len(x_t))
        return Prediction.of(self.network(x_t, t, **condition), x_t, t, signal, spread)

    def posterior_from(self, prediction: Prediction) -> Gaussian:
        """Build the Gaussian over x_0 from an existing prediction."""
        if not self.covariance.has_posterior:
            self.covariance.second_moment(prediction)  # which says why there is none
        return self.covariance.posterior(prediction, self.bounds)

    def step_from(self, prediction: Prediction, s: Time, posterior: Gaussian | None = None) -> Gaussian:
        """Build the Gaussian over x_s from an existing prediction, and from its posterior if you have it."""
        return self._step(prediction, self.forward.bridge(prediction.t, s), s, posterior)

    def _step(self, prediction: Prediction, bridge: Bridge, s: Time, posterior: Gaussian | None = None) -> Gaussian:
        if posterior is None:
            posterior = self.covariance.posterior(prediction, self.bounds)
        anchor = prediction.x_t
        if self.keeps_raw_noise:  # the point that clipped x_0 and raw noise explain
            anchor = self.forward.diffuse(posterior.mean, prediction.t, prediction.noise)
        if self.covariance.has_posterior:
            step = bridge.apply(posterior, anchor)
        else:
            step = self.covariance.step(prediction, posterior, bridge, anchor)
        return step if self.bounds.clip_mean else self._clipped_at_the_end(step, s)

    def _clipped_at_the_end(self, step: Gaussian, s: Time) -> Gaussian:
        last = torch.as_tensor(s) == 0
        if self.bounds.data_range is None or not bool(last.any()):
            return step
        last = last.to(step.mean.device).reshape(-1, *[1] * (step.mean.ndim - 1))
        return replace(step, mean=torch.where(last, self.bounds.clip_last(step.mean), step.mean))


def _not_points(x_t: object, by_time: Tensor) -> ValueError:
    """What to raise for no batch of points, or not one for each time; by_time: a coefficient of the times."""
    if not isinstance(x_t, Tensor):
        return ValueError(f"x_t must be a torch tensor, got {type(x_t).__name__}; convert it by torch.as_tensor")
    if x_t.ndim < 2 or not x_t.is_floating_point():
        return ValueError(f"x_t must be a floating-point tensor (B, *D), got {x_t.dtype} of shape {tuple(x_t.shape)}")
    return ValueError(f"there are {len(by_time)} times for {len(x_t)} data points; pass one time, or one for each")
