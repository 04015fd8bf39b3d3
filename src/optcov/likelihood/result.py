"""The bits/dim of images as a result that prints as a table, shows itself in a notebook, and plots.

A density of latents is not a density of images. So it is given in nats per latent dimension, never in bits/dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from optcov.covariances import Covariance, find_covariance
from optcov.likelihood.statistics import Estimate
from optcov.likelihood.table import KINDS, LikelihoodRow
from optcov.text_table import html_table, text_table

BITS, NATS = "bits/dim", "nats per latent dimension"


@final
@dataclass(frozen=True)
class Likelihoods:
    """Upper bounds of the negative log-likelihood, by covariance, number of steps and kind of times.

    They are in bits/dim, or in nats per latent dimension for latents.
    """

    rows: tuple[LikelihoodRow, ...]
    title: str = "bits/dim (upper bound)"
    settings: Mapping[str, Any] = field(default_factory=dict)  # conventions, numbers of images
    clamped: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # shares below and above the bounds
    latents: bool = False  # whether these are densities of latents, in nats per latent dimension

    @property
    def unit(self) -> str:
        """The unit of the numbers."""
        return NATS if self.latents else BITS

    @property
    def lengths(self) -> list[int]:
        """The numbers of steps K, ascending."""
        return sorted({row.K for row in self.rows})

    def of(self, covariance: str, K: int, kind: str = "ET") -> Estimate:
        """The bound of a covariance in K steps, in bits/dim, or in nats per latent dimension.

        covariance: the name of a covariance, of a method that uses it, such as "NPR-DDPM", or of a row of the table.
        kind: "ET" for even times, "OT" for optimal times.
        """
        kinds = Covariance.registry.values()
        name = next((kind.name for kind in kinds if covariance in [row.name for row in kind.rows]), covariance)
        shown = self._shown()
        for row, printed in zip(self.rows, shown, strict=True):
            if (row.K, row.kind) == (K, kind) and name in (row.covariance, printed.covariance):
                return printed.bits_per_dim
        known = ", ".join(dict.fromkeys(row.covariance for row in shown))
        raise ValueError(f"there is no bound of {covariance!r} in {K} steps ({kind}); there are {known}")

    def cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of a table, for display: methods by name, and the kind of times if there are two kinds."""
        shown = sorted(self._shown(), key=lambda row: row.kind)
        two = len({row.kind for row in shown}) > 1
        found = {(row.kind, row.covariance, row.K): str(row.bits_per_dim) for row in shown}
        lines = [
            (f"{name}, {KINDS[kind]}" if two else name, *(found.get((kind, name, K), "") for K in self.lengths))
            for kind, name in dict.fromkeys((row.kind, row.covariance) for row in shown)
        ]
        return ("", *(f"K = {K}" for K in self.lengths)), lines

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        rows = [row.to_json() for row in self.rows]
        if self.latents:
            for row, entry in zip(self.rows, rows, strict=True):
                del entry["bits_per_dim"]
                entry["nats_per_latent_dim"] = asdict(self._in_unit(row.bits_per_dim))
                entry["difference"] = None if row.difference is None else asdict(self._in_unit(row.difference))
        return {**self.settings, **({"unit": self.unit} if self.latents else {}), "rows": rows}

    def _shown(self) -> list[LikelihoodRow]:
        """The rows as a reader sees them: methods instead of covariances, numbers in their unit."""
        eta = self.settings.get("eta", 1.0)
        return [
            replace(
                row,
                covariance=find_covariance(row.covariance).row_at(eta),
                bits_per_dim=self._in_unit(row.bits_per_dim),
            )
            for row in self.rows
        ]

    def _in_unit(self, bits: Estimate) -> Estimate:
        if not self.latents:
            return bits
        error = None if bits.standard_error is None else bits.standard_error * math.log(2)
        return Estimate(bits.mean * math.log(2), error, bits.count)

    def plot(self, path: str | Path) -> Path:
        """Plot the bounds against the number of steps, write a PNG, and return its path."""
        from optcov.likelihood.plots import plot_bits

        plot_bits(self._shown(), Path(path), self.unit)
        return Path(path)

    def plot_all(self, directory: Path) -> None:
        """Write all plots into a directory: bits/dim, the terms by time, and the chosen times."""
        from optcov.likelihood.plots import plot_terms, plot_times

        K = self.lengths[len(self.lengths) // 2]
        self.plot(directory / "bits-per-dim.png")
        plot_terms(self._shown(), K, directory / "terms.png")
        plot_times(self._shown(), K, directory / "times.png")

    def __str__(self) -> str:
        return text_table(self.title, *self.cells())

    def _repr_html_(self) -> str:
        return html_table(self.title, *self.cells())
