"""Gaussian mixtures as data: every moment that a perfect network would know, in closed form.

For component j with mean m and covariance S, let C = alpha_bar S + beta_bar I and D = x_t - sqrt(alpha_bar) m. Given
x_t:

    E[eps]   = sqrt(beta_bar) C^-1 D              Cov[eps] = alpha_bar S C^-1
    E[x_0]   = m + sqrt(alpha_bar) S C^-1 D       Cov[x_0] = beta_bar S C^-1

The components are weighted by their probabilities given x_t. S C^-1 is computed by eigenvalues, so that no nearly equal
matrices are subtracted. The covariance of a component may be singular, or zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from optcov.forward import ForwardProcess, first_step_variance
from optcov.gaussian import LOG_2_PI
from optcov.prediction import Network, NoisePrediction, Prediction, check_kind, output_of
from optcov.schedule import Schedule, Time

NoiseError = Callable[[Tensor, Time], Tensor]


@final
@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a vector given x_t."""

    mean: Tensor  # (B, d)
    covariance: Tensor  # (B, d, d)


def _numbers(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} = {values!r:.80} are not numbers; pass a tensor or nested lists") from error


@final
class GaussianMixture:
    """A data distribution sum_j weights_j N(means_j, covariances_j) in d dimensions.

    weights: (J,), positive; they are scaled to sum to 1.
    means: (J, d).
    covariances: (J, d, d), or (J, d) if diagonal, or (J,) if isotropic.
    labels: the class of each component, (J,), whole numbers 0..C-1. With labels, every moment can be conditioned on the
    class of each point, `class_labels` (B,). C is the empty class: it says nothing. class_labels=None means the empty
    class for all.

    Points x_t are (B, d), or (B, *D) with d entries each.

    >>> data = GaussianMixture([0.5, 0.5], [[-1.0, 0.0], [1.0, 0.0]], [0.1, 0.2])
    >>> data.noise_moments(torch.zeros(3, 2), Schedule.linear(), 500).mean.shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        weights: Sequence[float] | Tensor,
        means: Any,
        covariances: Any,
        labels: Sequence[int] | Tensor | None = None,
    ):
        self.weights, self.means = _numbers("weights", weights), _numbers("means", means)
        covariances = _numbers("covariances", covariances)
        if self.weights.ndim != 1 or not bool((self.weights > 0).all()):
            raise ValueError(f"weights must be positive numbers, one per component, got {self.weights.tolist()}")
        self.weights = self.weights / self.weights.sum()
        count = len(self.weights)
        if self.means.ndim != 2 or len(self.means) != count:
            raise ValueError(f"means must have shape ({count}, d), got {tuple(self.means.shape)}")
        self.dimension = d = self.means.shape[1]
        if covariances.shape == (count,):
            covariances = covariances[:, None].expand(count, d)
        if covariances.shape == (count, d) and covariances.ndim == 2:
            covariances = torch.diag_embed(covariances)
        if covariances.shape != (count, d, d):
            raise ValueError(
                f"covariances must have shape ({count},), ({count}, {d}) or ({count}, {d}, {d}), "
                f"got {tuple(covariances.shape)}"
            )
        for name, values in [("weights", self.weights), ("means", self.means), ("covariances", covariances)]:
            if not bool(values.isfinite().all()):
                raise ValueError(f"{name} must be finite numbers, got {values.flatten().tolist()[:20]}")
        if bool(((covariances - covariances.mT).abs() > 1e-10 * covariances.abs().amax()).any()):
            raise ValueError("covariances must be symmetric")
        self.covariances = covariances = (covariances + covariances.mT) / 2
        self._values: Tensor
        self._vectors: Tensor
        self._values, self._vectors = torch.linalg.eigh(covariances)  # (J, d), (J, d, d)
        if bool((self._values < -1e-10 * self._values.abs().max()).any()):
            raise ValueError(
                f"covariances must be positive semi-definite, but have the eigenvalue {float(self._values.min())}"
            )
        self._values = self._values.clamp(min=0.0)
        self.labels = None if labels is None else _check_labels(torch.as_tensor(labels), count)

    @property
    def classes(self) -> int:
        """C: the number of classes, and the label of the empty class. 0 without labels."""
        return 0 if self.labels is None else int(self.labels.max()) + 1

    def of_class(self, label: int) -> GaussianMixture:
        """The distribution of one class alone."""
        inside = torch.isfinite(self._log_weights(torch.tensor([label]))[0])
        return GaussianMixture(self.weights[inside], self.means[inside], self.covariances[inside])

    def class_log_probabilities(self, x_t: Tensor, schedule: Schedule, t: Time) -> Tensor:
        """log p(class | x_t), (B, C). At t = 0, x_t is data."""
        if self.labels is None:
            raise ValueError("this mixture has no classes; pass labels, one per component")
        joint = self._log_joint(x_t, *self._levels(schedule, t, len(x_t)))
        by_class = [joint[:, self.labels == label].logsumexp(-1) for label in range(self.classes)]
        return torch.stack(by_class, 1).log_softmax(-1)

    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Draw data points, (count, d), float64."""
        component, generator = self._drawn_components(count, seed)
        noise = torch.randn(count, self.dimension, generator=generator, dtype=torch.float64)
        roots = (self._vectors * self._values.sqrt().unsqueeze(-2)) @ self._vectors.mT
        return self.means[component] + (roots[component] @ noise.unsqueeze(-1)).squeeze(-1)

    def sample_labelled(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Draw data points, (count, d), float64, and their classes, (count,)."""
        if self.labels is None:
            raise ValueError("this mixture has no classes; pass labels, one per component")
        return self.sample(count, seed), self.labels[self._drawn_components(count, seed)[0]]

    def log_density(self, x_t: Tensor, schedule: Schedule, t: Time, class_labels: Tensor | None = None) -> Tensor:
        """log q(x_t) in nats, (B,). At t = 0 it is the density of the data."""
        return self._log_joint(x_t, *self._levels(schedule, t, len(x_t)), class_labels).logsumexp(-1)

    def responsibilities(self, x_t: Tensor, schedule: Schedule, t: Time, class_labels: Tensor | None = None) -> Tensor:
        """Probability of each component given x_t, (B, J)."""
        return self._log_joint(x_t, *self._levels(schedule, t, len(x_t)), class_labels).softmax(-1)

    def noise_moments(self, x_t: Tensor, schedule: Schedule, t: Time, class_labels: Tensor | None = None) -> Moments:
        """E[eps | x_t] and Cov[eps | x_t]."""
        share = self.responsibilities(x_t, schedule, t, class_labels)
        alpha_bar, beta_bar = self._levels(schedule, t, len(x_t))
        deviation, total = self._in_eigenbasis(x_t, alpha_bar, beta_bar)
        means = self._rotate_back(beta_bar.sqrt()[:, None, None] * deviation / total)
        return self._mix(share, means, alpha_bar[:, None, None] * self._values / total)

    def clean_moments(self, x_t: Tensor, schedule: Schedule, t: Time, class_labels: Tensor | None = None) -> Moments:
        """E[x_0 | x_t] and Cov[x_0 | x_t]."""
        share = self.responsibilities(x_t, schedule, t, class_labels)
        alpha_bar, beta_bar = self._levels(schedule, t, len(x_t))
        deviation, total = self._in_eigenbasis(x_t, alpha_bar, beta_bar)
        means = self.means + self._rotate_back(alpha_bar.sqrt()[:, None, None] * self._values * deviation / total)
        return self._mix(share, means, beta_bar[:, None, None] * self._values / total)

    def reverse_moments(
        self, x_t: Tensor, forward: ForwardProcess, t: Time, s: Time, class_labels: Tensor | None = None
    ) -> Moments:
        """Exact mean and covariance of q(x_s | x_t), which is not Gaussian."""
        bridge = forward.bridge(t, s)
        clean = self.clean_moments(x_t, forward.schedule, t, class_labels)
        weight, kept, spread = (
            value.expand(len(x_t)) for value in (bridge.clean_weight, bridge.noisy_weight, bridge.variance)
        )
        identity = torch.eye(self.dimension, dtype=torch.float64)
        return Moments(
            mean=weight[:, None] * clean.mean + kept[:, None] * x_t.flatten(1).double(),
            covariance=spread[:, None, None] * identity + weight.square()[:, None, None] * clean.covariance,
        )

    def velocity_moments(self, x_t: Tensor, schedule: Schedule, t: Time, class_labels: Tensor | None = None) -> Moments:
        """Mean and covariance of the velocity given x_t (see optcov.prediction), also where no signal is left."""
        clean = self.clean_moments(x_t, schedule, t, class_labels)
        a, b = (level.expand(len(x_t)) for level in schedule.levels(t))
        power = a.square() + b.square()
        of_x, of_clean = a / (b * power.sqrt()), -power.sqrt() / b
        return Moments(
            of_x[:, None] * x_t.flatten(1).double() + of_clean[:, None] * clean.mean,
            of_clean.square()[:, None, None] * clean.covariance,
        )

    def network(
        self, schedule: Schedule, error: NoiseError | Tensor | float | None = None, prediction_type: str = "epsilon"
    ) -> Network:
        """A network with perfect heads. Its mean is perfect, except for a chosen error that is added to the noise.

        error: a number, a tensor that broadcasts to x_t, or a function of (x_t, t). The NPR heads include the error,
        because they estimate E[(eps - eps_hat)^2]. The SN heads do not depend on it. The OCM head is that of a perfect
        mean. The range head minimises Improved DDPM's loss, which scores single steps of the full process
        (`Schedule.small_step`).
        prediction_type: what the network returns, see optcov.prediction. All types except "epsilon" work where no
        signal is left. For them, the heads and the error are in velocity units.

        If the mixture has labels, the network needs the condition `class_labels`, (B,).
        """
        noisy = check_kind(prediction_type) == "epsilon"

        def predict(x_t: Tensor, t: Time, class_labels: Tensor | None = None) -> NoisePrediction | Prediction:
            if self.labels is not None and class_labels is None:
                raise ValueError(
                    f"this network needs the condition class_labels, one per point; {self.classes} is the empty class"
                )
            if not x_t.is_floating_point():
                raise ValueError(f"x_t must be a floating-point tensor, got {x_t.dtype}")
            if bool((schedule.check_times(t) == 0).any()):
                raise ValueError("time 0 is data: there is no noise to predict; ask at a time above 0")
            moments_of = self.noise_moments if noisy else self.velocity_moments
            moments = moments_of(x_t, schedule, t, class_labels)
            variance = moments.covariance.diagonal(dim1=-2, dim2=-1)
            offset = torch.zeros_like(moments.mean)
            if error is not None:
                raw = error(x_t, t) if callable(error) else error
                offset = torch.as_tensor(raw, dtype=torch.float64).expand(x_t.shape).flatten(1)
            heads = {
                "sn": (variance + moments.mean.square()).reshape(x_t.shape),
                "npr": (variance + offset.square()).reshape(x_t.shape),
                "ocm": variance.reshape(x_t.shape),
                "sn_full": moments.covariance + moments.mean.unsqueeze(-1) * moments.mean.unsqueeze(-2),
                "npr_full": moments.covariance + offset.unsqueeze(-1) * offset.unsqueeze(-2),
            }
            signal, spread = schedule.levels(t)
            if schedule.small_step < schedule.final_time:
                factor = (spread / (signal if noisy else (signal.square() + spread.square()).sqrt())).square()
                heads["range"] = _range_of(variance + offset.square(), factor, schedule, t).reshape(x_t.shape)
            mean = (moments.mean + offset).reshape(x_t.shape)
            heads = {name: head.to(x_t.dtype) for name, head in heads.items()}
            if noisy:
                return NoisePrediction(mean.to(x_t.dtype), heads)
            known = Prediction(x_t.double(), t, mean, "v_prediction", signal, spread)
            output = output_of(prediction_type, known.clean, known.noise, signal, spread).to(x_t.dtype)
            units = dict.fromkeys(heads, "velocity")
            return Prediction(x_t, t, output, prediction_type, signal, spread).with_heads(heads, units)

        return predict

    def _drawn_components(self, count: int, seed: int) -> tuple[Tensor, torch.Generator]:
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(self.weights, count, replacement=True, generator=generator), generator

    def _levels(self, schedule: Schedule, t: Time, batch: int) -> tuple[Tensor, Tensor]:
        """alpha_bar and beta_bar, each (B,)."""
        return schedule.alpha_bar(t).expand(batch), schedule.beta_bar(t).expand(batch)

    def _in_eigenbasis(self, x_t: Tensor, alpha_bar: Tensor, beta_bar: Tensor) -> tuple[Tensor, Tensor]:
        """x_t - sqrt(alpha_bar) m, and the eigenvalues of C, in each component's eigenbasis: (B, J, d) both."""
        points = x_t.flatten(1).double()
        if points.shape[1] != self.dimension:
            raise ValueError(
                f"points have {points.shape[1]} entries, but this mixture lives in {self.dimension} dimensions"
            )
        deviation = points[:, None, :] - alpha_bar.sqrt()[:, None, None] * self.means
        rotated = torch.einsum("jki,bjk->bji", self._vectors, deviation)
        return rotated, alpha_bar[:, None, None] * self._values + beta_bar[:, None, None]

    def _rotate_back(self, coordinates: Tensor) -> Tensor:
        return torch.einsum("jik,bjk->bji", self._vectors, coordinates)

    def _log_joint(
        self, x_t: Tensor, alpha_bar: Tensor, beta_bar: Tensor, class_labels: Tensor | None = None
    ) -> Tensor:
        """log(weights_j N(x_t; component j)), (B, J), the weights being those within the class."""
        deviation, total = self._in_eigenbasis(x_t, alpha_bar, beta_bar)
        exponent = (deviation.square() / total + total.log()).sum(-1) + self.dimension * LOG_2_PI
        if class_labels is not None and class_labels.shape != (len(x_t),):
            raise ValueError(
                f"class_labels have shape {tuple(class_labels.shape)}, but there are {len(x_t)} points; pass one each"
            )
        weights = self.weights.log() if class_labels is None else self._log_weights(class_labels)
        return weights - exponent / 2

    def _log_weights(self, class_labels: Tensor) -> Tensor:
        """log of the weights within each class, (B, J); minus infinity for components of other classes."""
        if self.labels is None:
            raise ValueError("this mixture has no classes; pass labels, one per component")
        asked = class_labels.long().cpu()
        outside = (asked < 0) | (asked > self.classes)
        if bool(outside.any()):
            raise ValueError(
                f"class {int(asked[outside][0])} is none of 0..{self.classes - 1}, nor the empty class {self.classes}"
            )
        inside = (asked[:, None] == self.labels) | (asked[:, None] == self.classes)
        return torch.where(inside, self.weights, 0.0).log().log_softmax(-1)

    def _mix(self, share: Tensor, means: Tensor, eigenvalues: Tensor) -> Moments:
        """Moments of the mixture from its components' shares (B, J), means and covariance eigenvalues (B, J, d)."""
        mean = torch.einsum("bj,bji->bi", share, means)
        between = means - mean[:, None, :]
        covariance = torch.einsum("bj,jik,bjk,jlk->bil", share, self._vectors, eigenvalues, self._vectors)
        return Moments(mean, covariance + torch.einsum("bj,bji,bjk->bik", share, between, between))


def _check_labels(labels: Tensor, count: int) -> Tensor:
    if labels.shape != (count,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be {count} whole numbers, one per component, got {labels.tolist()}")
    if sorted(set(labels.tolist())) != list(range(int(labels.max()) + 1)):
        raise ValueError(f"labels must number the classes from 0 without a gap, got {sorted(set(labels.tolist()))}")
    return labels.long()


def _range_of(residual: Tensor, factor: Tensor, schedule: Schedule, t: Time) -> Tensor:
    """The v of Improved DDPM that gives the optimal variance of a single step down from t.

    residual: the mean square of what the prediction leaves, (B, d), which times the factor is that of x_0.
    """
    times = schedule.check_times(t).reshape(-1)
    bridge = ForwardProcess(schedule).bridge(times, (times - schedule.small_step).clamp(min=0))
    low = torch.where(bridge.variance > 0, bridge.variance, first_step_variance(schedule)).log()
    high = (bridge.variance + bridge.clean_weight.square() * schedule.beta_bar(times)).log()
    variance = bridge.variance[:, None] + (bridge.clean_weight.square() * factor)[:, None] * residual
    v = 2 * (variance.log() - low[:, None]) / (high - low)[:, None] - 1
    return v.clamp(-1, 1)  # the best that lies between beta-tilde and beta
