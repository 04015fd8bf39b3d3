"""The reverse step p(x_s | x_t): a Gaussian made of the network's prediction and the bridge (Eqs. 1, 6).

mean       = gamma x0_hat + kappa x_t
covariance = lambda^2 I + gamma^2 v
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from optcov.estimators import CovarianceDesign, PerTime, make_estimator
from optcov.forward import ForwardProcess
from optcov.gaussian import ClampCounts, Gaussian, weighted_sum
from optcov.prediction import Network, NoisePrediction
from optcov.schedule import Time


@final
class ClampStatistics:
    """Counts of clamped variances since construction, kept on the device until somebody asks."""

    def __init__(self) -> None:
        self._below: Tensor | int = 0
        self._above: Tensor | int = 0
        self.total = 0

    def add(self, counts: ClampCounts | None) -> None:
        """Add the counts of one step; None for designs that have nothing to clamp."""
        if counts is not None:
            self._below = self._below + counts.below
            self._above = self._above + counts.above
            self.total += counts.total

    @property
    def below(self) -> int:
        """Variances that were negative and were set to 0."""
        return int(self._below)

    @property
    def above(self) -> int:
        """Variances that exceeded what the data range allows."""
        return int(self._above)

    def __repr__(self) -> str:
        return f"ClampStatistics(below={self.below}, above={self.above}, total={self.total})"


@final
class ReverseProcess:
    """A network, a forward process and a covariance design, which together give the reverse step.

    covariance: "beta_tilde" | "beta" | "analytic" | "npr_isotropic" | "sn" | "npr" | "range", the matrix forms
    "sn_full" | "npr_full", or an estimator object. "analytic" takes mean_square_noise, "npr_isotropic" takes
    mean_square_residual: a tensor of length N + 1, or a callable of t.

    data_range: x0_hat is clipped to it, and v to [0, (half its width)^2]. None: neither, only v >= 0 holds.

    use_clipped_model_output: True derives the noise again from the clipped x0_hat, False keeps the predicted noise
    beside the clipped x0_hat, as the paper's DDIM rows do. None means eta == 1.

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
        covariance: str | CovarianceDesign = "npr",
        data_range: tuple[float, float] | None = (-1, 1),
        use_clipped_model_output: bool | None = None,
        *,
        mean_square_noise: PerTime | None = None,
        mean_square_residual: PerTime | None = None,
    ):
        if not callable(network):
            raise ValueError(
                f"network = {network!r} is not callable; a network is a function (x_t, t) -> NoisePrediction"
            )
        if data_range is not None and not (len(data_range) == 2 and data_range[0] < data_range[1]):
            raise ValueError(
                f"data_range = {data_range} is not (low, high) with low < high; pass None for unbounded data"
            )
        estimator = make_estimator(covariance, mean_square_noise, mean_square_residual)
        estimator.check(forward)
        self.network, self.forward, self.estimator = network, forward, estimator
        self.data_range = data_range
        self.use_clipped_model_output = (
            forward.eta == 1 if use_clipped_model_output is None else use_clipped_model_output
        )
        self.clamps = ClampStatistics()

    def predict(self, x_t: Tensor, t: Time) -> NoisePrediction:
        """Ask the network about x_t (B, *D), without looking at the values it returns."""
        if not isinstance(x_t, Tensor):
            raise ValueError(f"x_t must be a torch tensor, got {type(x_t).__name__}; convert it by torch.as_tensor")
        if x_t.ndim < 2 or not x_t.is_floating_point():
            raise ValueError(
                f"x_t must be a floating-point tensor (B, *D), got {x_t.dtype} of shape {tuple(x_t.shape)}"
            )
        prediction = self.network(x_t, t)
        if not isinstance(prediction, NoisePrediction):
            raise ValueError(
                f"the network returned a {type(prediction).__name__}; a network returns NoisePrediction(noise, heads)"
            )
        if prediction.noise.shape != x_t.shape:
            raise ValueError(
                f"the network returned noise of shape {tuple(prediction.noise.shape)} for x_t of shape "
                f"{tuple(x_t.shape)}; they must agree (is this a network with a second output that belongs into heads?)"
            )
        return _lifted(prediction)

    def clean_mean(self, prediction: NoisePrediction, x_t: Tensor, t: Time) -> Tensor:
        """x0_hat, clipped to the data range, (B, *D)."""
        schedule, x_t = self.forward.schedule, _at_least_float32(x_t)
        noise_std, signal_std = schedule.beta_bar(t).sqrt(), schedule.alpha_bar(t).sqrt()
        x_0 = weighted_sum(1 / signal_std, x_t, -noise_std / signal_std, prediction.noise)
        return x_0 if self.data_range is None else x_0.clamp(*self.data_range)

    def posterior_from(self, prediction: NoisePrediction, x_t: Tensor, t: Time) -> Gaussian:
        """Build the Gaussian over x_0 from a prediction at hand."""
        covariance, counts = self.estimator.clean_covariance(
            prediction, self.forward.schedule, t, self.largest_variance
        )
        self.clamps.add(counts)
        return Gaussian(self.clean_mean(prediction, x_t, t), covariance)

    def step_from(self, prediction: NoisePrediction, x_t: Tensor, t: Time, s: Time) -> Gaussian:
        """Build the Gaussian over x_s from a prediction at hand."""
        covariance, counts = self.estimator.step_covariance(prediction, self.forward, t, s, self.largest_variance)
        self.clamps.add(counts)
        return Gaussian(self._step_mean(prediction, x_t, t, s), covariance)

    def posterior(self, x_t: Tensor, t: Time) -> Gaussian:
        """Gaussian over x_0 given x_t (B, *D)."""
        self.forward.schedule.check_times(t)
        return self.posterior_from(self._checked_prediction(x_t, t), x_t, t)

    def step(self, x_t: Tensor, t: Time, s: Time) -> Gaussian:
        """Gaussian over x_s given x_t (B, *D), 0 <= s < t."""
        self.forward.bridge(t, s)  # refuses bad times before the network runs
        return self.step_from(self._checked_prediction(x_t, t), x_t, t, s)

    @property
    def largest_variance(self) -> float | None:
        """The largest variance that data in the range can have, ((high - low) / 2)^2."""
        return None if self.data_range is None else ((self.data_range[1] - self.data_range[0]) / 2) ** 2

    def _step_mean(self, prediction: NoisePrediction, x_t: Tensor, t: Time, s: Time) -> Tensor:
        bridge, x_t = self.forward.bridge(t, s), _at_least_float32(x_t)
        x_0 = self.clean_mean(prediction, x_t, t)
        if self.data_range is not None and not self.use_clipped_model_output:
            x_t = self.forward.diffuse(x_0, t, prediction.noise)  # the point that clipped x_0 and raw noise explain
        return weighted_sum(bridge.clean_weight, x_0, bridge.noisy_weight, x_t)

    def _checked_prediction(self, x_t: Tensor, t: Time) -> NoisePrediction:
        prediction = self.predict(x_t, t)
        bad = prediction.bad_samples()
        if bool(bad.any()) and not bool(x_t.isfinite().all()):
            raise ValueError(f"x_t holds NaN or infinity at time {t}, before any step was made")
        require_finite(bad, t)
        return prediction


def require_finite(bad: Tensor, t: Time) -> None:
    """Raise a ValueError that names the time and the samples, if any (B,) is marked."""
    if bool(bad.any()):
        samples = bad.nonzero().flatten().tolist()
        raise ValueError(
            f"the network returned NaN or infinity at time {t} for samples {samples[:10]}"
            f"{' and others' if len(samples) > 10 else ''}; check its input scale, its weights and its precision"
        )


def _lifted(prediction: NoisePrediction) -> NoisePrediction:
    """Lift half-precision outputs, so that variances and means are never computed in them."""
    heads = {name: _at_least_float32(head) for name, head in prediction.heads.items()}
    return NoisePrediction(_at_least_float32(prediction.noise), heads)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()
