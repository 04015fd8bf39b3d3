"""Covariances that correlate pixels by frequencies of an orthonormal cosine basis B (optcov.gaussian.basis).

    spectral         k B^T diag(p_t) B,   p_t = E (B r)^2                 no head: one number per time and frequency
    npr_correlated   D^1/2 C_t D^1/2,     D = diag(k g) of NPR
    sn_correlated    D^1/2 C_t D^1/2,     D = diag(k (h - eps_hat^2)) of SN

r is the residual of the network's prediction in velocity units, so that p_t is finite where no signal is left, and
k = beta_bar / (alpha_bar + beta_bar). C_t is the correlation with the spectrum c_t = E (B r / sqrt(g))^2, of mean 1.

The spectral step lam2 I + gamma^2 v is exact. That of the correlated ones is the fast form of `gaussian.Correlated`.
Its variances of single pixels are those of NPR and SN. Draws and scores are of one and the same Gaussian.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from optcov.covariances.base import Covariance, Example, Row
from optcov.covariances.residual import Residual
from optcov.covariances.squared_noise import SquaredNoise
from optcov.gaussian import PLAIN, Basis, Correlated, CovarianceShape, Diagonal, Spectral, per_sample
from optcov.prediction import Prediction
from optcov.schedule import Time
from optcov.text_table import in_one_line

LEAST_SHARE = 1e-3  # of an image's mean variance: what a smaller one counts as when residuals are divided by it


@final
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Powers in an orthonormal basis of frequencies, by time."""

    at: Callable[[Time], Tensor]  # t, () or (B,) -> powers, (*D) or (B, *D), positive
    basis: Basis = PLAIN

    def __post_init__(self) -> None:
        if not _takes_a_time(self.at):
            raise ValueError(f"a spectrum is a function of the time t alone, not {in_one_line(self.at)}; pass one")
        if not isinstance(self.basis, Basis):
            raise ValueError(f"basis = {in_one_line(self.basis)} is not a Basis; pass optcov.gaussian.Basis(channels)")

    @staticmethod
    def of(given: Any) -> Spectrum:
        """Take a Spectrum, a callable of t, or powers (*D) for all times: a tensor, an array or a list."""
        if isinstance(given, Spectrum):
            return given
        if callable(given):
            return Spectrum(given)
        powers = _as_powers(given)
        if powers is None:
            raise ValueError(
                f"spectrum = {in_one_line(given)} is neither a Spectrum, nor a callable of t, nor powers of an image; "
                f"pass one of them"
            )
        return Spectrum(lambda t: powers)

    def power(self, t: Time, like: Tensor) -> Tensor:
        """Powers at t, (1, *D) or (B, *D), as `like` (B, *D) is."""
        found, where = _as_powers(said := self.at(t)), f"the spectrum at t = {in_one_line(t)}"
        if found is None:
            kind = said.dtype if isinstance(said, Tensor) else f"a {type(said).__name__}"
            raise ValueError(f"{where} is {kind}; return a tensor of powers, one real number for each frequency")
        if found.ndim == like.ndim - 1:
            found = found.unsqueeze(0)
        if found.shape[1:] != like.shape[1:] or len(found) not in (1, len(like)):
            raise ValueError(
                f"{where} has shape {tuple(found.shape)}, but x_t has {tuple(like.shape)}; a spectrum "
                f"has one power per frequency, as many as an image has pixels"
            )
        if not bool((found.isfinite() & (found > 0)).all()):
            raise ValueError(f"{where} has a power that is not positive and finite; measure it again")
        return found.to(like.device, torch.promote_types(like.dtype, torch.float32))


def _as_powers(given: Any) -> Tensor | None:
    """Real numbers as a tensor; None for one number alone, and for what holds something else."""
    try:
        powers = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if powers.ndim == 0 or powers.is_complex() or powers.dtype == torch.bool else powers


def _takes_a_time(function: Any) -> bool:
    """Whether it can be called with one argument, as far as it says which it takes."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(1.0)
    except TypeError:
        return False
    except ValueError:  # it does not say
        return True
    return True


class BySpectrum(Covariance):
    """What needs a spectrum; it is measured of `normalised` residuals."""

    structure = "correlated"
    spectrum: ClassVar[str]

    def __init__(self, spectrum: Any):
        self.powers = Spectrum.of(spectrum)

    @classmethod
    def normalised(cls, example: Example) -> Tensor:
        """The residuals whose powers per frequency the spectrum is, (B, *D)."""
        raise NotImplementedError


@final
class SpectralResidual(BySpectrum):
    """v = k B^T diag(E (B r)^2) B: the residual's covariance, if it is the same for all images and places."""

    name = "spectral"
    spectrum = "residual"
    rows = (Row("Spectral-DDPM", 1.0, noise_cap=1.0), Row("Spectral-DDIM", 0.0, noise_cap=1.0))

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        power = self.powers.power(prediction.t, prediction.x_t)
        zero = torch.zeros((), dtype=torch.float64)
        return Spectral(power, self.powers.basis).affine(prediction.factor("velocity"), zero)

    @classmethod
    def normalised(cls, example: Example) -> Tensor:
        return example.residual("velocity")


class _CorrelatedHead(BySpectrum):
    """The variances of a head, with correlations between the pixels."""

    base: ClassVar[type[Residual] | type[SquaredNoise]]

    def second_moment(self, prediction: Prediction) -> CovarianceShape:
        variance = self.base().second_moment(prediction)
        assert isinstance(variance, Diagonal)
        power = self.powers.power(prediction.t, prediction.x_t)
        return Correlated(variance.variance, power, self.powers.basis)

    @classmethod
    def normalised(cls, example: Example) -> Tensor:
        """Residuals over the standard deviations that the head gives them."""
        prediction = example.prediction
        variance = cls.base().second_moment(prediction)
        assert isinstance(variance, Diagonal)
        v = variance.variance / per_sample(prediction.factor("velocity"), variance.variance)
        mean = v.flatten(1).mean(1).clamp(min=torch.finfo(v.dtype).tiny)
        return example.residual("velocity") / torch.maximum(v, LEAST_SHARE * per_sample(mean, v)).sqrt()


@final
class CorrelatedResidual(_CorrelatedHead):
    """NPR with correlations."""

    name = "npr_correlated"
    head = "npr"
    spectrum = "npr"
    unit = "velocity"
    base = Residual
    rows = (Row("CNPR-DDPM", 1.0, noise_cap=1.0), Row("CNPR-DDIM", 0.0, noise_cap=1.0))


@final
class CorrelatedSquaredNoise(_CorrelatedHead):
    """SN with correlations."""

    name = "sn_correlated"
    head = "sn"
    spectrum = "sn"
    unit = "velocity"
    base = SquaredNoise
    rows = (Row("CSN-DDPM", 1.0, noise_cap=1.0), Row("CSN-DDIM", 0.0, noise_cap=1.0))
