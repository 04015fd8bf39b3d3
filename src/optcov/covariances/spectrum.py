"""Powers per frequency as a function of time: what the covariances that correlate pixels need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from optcov.gaussian import PLAIN, Basis
from optcov.schedule import Time


@final
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Powers in an orthonormal basis of frequencies, by time."""

    at: Callable[[Time], Tensor]  # t, () or (B,) -> powers, (*D) or (B, *D), positive
    basis: Basis = PLAIN

    @staticmethod
    def of(given: Any) -> Spectrum:
        """Take a Spectrum, a callable of t, or one tensor of powers (*D) for all times."""
        if isinstance(given, Spectrum):
            return given
        if isinstance(given, Tensor) and given.is_floating_point() and given.ndim:
            return Spectrum(lambda t: given)
        if callable(given):
            return Spectrum(given)
        raise ValueError(
            f"spectrum = {given!r:.80} is neither a Spectrum, nor a callable of t, nor a tensor of powers of an image"
        )

    def power(self, t: Time, like: Tensor) -> Tensor:
        """Powers at t, (1, *D) or (B, *D), as `like` (B, *D) is."""
        found = self.at(t)
        if not isinstance(found, Tensor):
            raise ValueError(f"the spectrum at t = {t} is a {type(found).__name__}; return a tensor of powers")
        if found.ndim == like.ndim - 1:
            found = found.unsqueeze(0)
        if found.shape[1:] != like.shape[1:] or len(found) not in (1, len(like)):
            raise ValueError(
                f"the spectrum at t = {t} has shape {tuple(found.shape)}, but x_t has {tuple(like.shape)}; a spectrum "
                f"has one power per frequency, as many as an image has pixels"
            )
        if not bool((found.isfinite() & (found > 0)).all()):
            raise ValueError(f"the spectrum at t = {t} has a power that is not positive and finite; measure it again")
        return found.to(like.device, torch.promote_types(like.dtype, torch.float32))
