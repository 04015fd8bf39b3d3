"""The result of a restoration: samples of the posterior, their mean and spread, and their fit to the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from torch import Tensor

from optcov.text_table import html_table, text_table

if TYPE_CHECKING:
    from optcov.inverse.operators import Operator


@final
@dataclass(frozen=True, repr=False)
class Restoration:
    """Samples of x_0 given a measurement. With a batch of measurements, every entry has a first axis B."""

    samples: Tensor  # (S, *D) or (B, S, *D)
    measurement: Tensor  # (*M) or (B, *M)
    residual: Tensor  # root mean square of y - A x over what is measured, (S,) or (B, S)
    evaluations: int  # of the network, per sample
    gradients: int  # passes back through the network, per sample
    unsolved: float  # share of the linear systems that conjugate gradients did not solve to the tolerance
    operator: Operator
    noise_std: float
    method: str
    data_range: tuple[float, float] | None = None

    @property
    def batched(self) -> bool:
        """Whether the entries have a first axis B."""
        return self.samples.ndim == len(self.operator.shape) + 2

    @property
    def mean(self) -> Tensor:
        """Mean of the samples, (*D) or (B, *D). It minimises the expected squared error."""
        return self.samples.mean(int(self.batched))

    @property
    def std(self) -> Tensor:
        """Standard deviation of the samples per pixel, (*D) or (B, *D)."""
        return self.samples.std(int(self.batched), unbiased=self.samples.shape[int(self.batched)] > 1)

    def cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of a table, for display."""
        count = self.samples.shape[int(self.batched)]
        images = len(self.samples) if self.batched else 1
        rows: list[tuple[str, ...]] = [
            ("method", self.method),
            ("operator", self.operator.name),
            ("images x samples", f"{images} x {count}"),
            ("evaluations per sample", str(self.evaluations)),
            ("passes back per sample", str(self.gradients)),
            ("noise of the measurement", f"{self.noise_std:.4g}"),
            ("residual of the measurement", f"{float(self.residual.square().mean().sqrt()):.4g}"),
            ("mean standard deviation", f"{float(self.std.mean()):.4g}"),
        ]
        if self.unsolved:
            rows.append(("systems not solved to the tolerance", f"{self.unsolved:.1%}"))
        return ("restoration", "value"), rows

    def plot(self, path: str | Path, truth: Tensor | None = None, shown: int = 4) -> Path:
        """Write a PNG with measurement, mean, standard deviation, samples, and the truth if given. Return its path."""
        from optcov.inverse.pictures import draw_restoration

        self._check_truth(truth)
        draw_restoration(self, Path(path), truth, shown)
        return Path(path)

    def save(self, directory: str | Path, truth: Tensor | None = None) -> dict[str, object]:
        """Write picture, mean and samples of one image as PNG, and the numbers as JSON. Return these numbers."""
        from optcov.data import to_8bit, write_png
        from optcov.inverse.scores import psnr
        from optcov.storage import as_path, write_json

        if self.batched:
            raise ValueError(f"{len(self.samples)} images are restored; save one at a time, or restore one measurement")
        out = as_path(directory)
        self.plot(out / "restoration.png", truth)
        write_png(out / "mean.png", to_8bit(self.mean[None])[0])
        for number, sample in enumerate(to_8bit(self.samples)):
            write_png(out / "samples" / f"{number:06d}.png", sample)
        for older in (out / "samples").glob("[0-9]" * 6 + ".png"):
            if int(older.stem) >= len(self.samples):
                older.unlink()
        low, high = self.data_range or (-1.0, 1.0)
        told: dict[str, object] = {
            "directory": str(out),
            "picture": str(out / "restoration.png"),
            "method": self.method,
            "operator": self.operator.name,
            "samples": len(self.samples),
            "noise": self.noise_std,
            "residual": float(self.residual.square().mean().sqrt()),
            "mean_deviation": float(self.std.mean()),
            "evaluations": self.evaluations,
            "gradients": self.gradients,
            "unsolved": self.unsolved,
            "psnr": None if truth is None else float(psnr(self.mean[None], truth[None], high - low)),
        }
        write_json(out / "restoration.json", told)
        return told

    def _check_truth(self, truth: Tensor | None) -> None:
        if truth is None:
            return
        if not isinstance(truth, Tensor) or truth.shape != self.mean.shape or not bool(truth.isfinite().all()):
            raise ValueError(f"the truth is no finite tensor of shape {tuple(self.mean.shape)}; pass x_0 itself")

    def __str__(self) -> str:
        return text_table("x_0 given a measurement", *self.cells())

    def __repr__(self) -> str:
        return f"Restoration({self.method!r}, {self.operator.name}, samples {tuple(self.samples.shape)})"

    def _repr_html_(self) -> str:
        return html_table("x_0 given a measurement", *self.cells())
