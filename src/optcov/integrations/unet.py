"""A U-Net and a head as one diffusers model, with 2C output channels: noise and second moment.

save_pretrained and from_pretrained work as for any other model. The config holds the configs of both parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin, UNet2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, nn

from optcov.gaussian import per_sample
from optcov.networks import Backbone, Head, build_head, head_config
from optcov.networks.classes import LABELS
from optcov.networks.paper_unet import PaperUNet
from optcov.prediction import Prediction

UNETS: dict[str, Any] = {"UNet2DModel": UNet2DModel, "PaperUNet": PaperUNet}


class UNetWithHead(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A UNet2DModel with a head on its features. It has the interface of a UNet2DModel.

    unet: the config of the U-Net, with its `_class_name`.
    head: the config of the head. None for a network that only needs its times translated.
    time_arguments: the U-Net's time input at each timestep 0..N-1 of the scheduler. None if it is the timestep itself.
    log_snrs: the log-SNR at each timestep. Some heads need it. It also turns the U-Net's output into noise, if
    prediction_type is not "epsilon".
    class_label: the class of every image, for a U-Net with classes in a pipeline that passes none.
    input_scales: the factor of x_t at each timestep, for a U-Net of another process than the scheduler's.
    in_channels and sample_size are attributes that pipelines read. Use `wrap` to build one from existing parts.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        unet: dict[str, Any],
        head: dict[str, Any] | None,
        time_arguments: list[float] | None = None,
        in_channels: int = 3,
        sample_size: int | tuple[int, int] | None = None,
        log_snrs: list[float] | None = None,
        prediction_type: str = "epsilon",
        class_label: int | None = None,
        input_scales: list[float] | None = None,
    ):
        super().__init__()
        name = unet.get("_class_name")
        if name not in UNETS:
            raise ValueError(f"cannot build a U-Net of class {str(name)[:80]!r}; it must be one of {', '.join(UNETS)}")
        self.backbone = Backbone.of(UNETS[name].from_config(dict(unet)))
        self.moment_head = None if head is None else build_head(head)
        # not a buffer: a model moved to half precision would round the times with the weights
        self._time_arguments = None if time_arguments is None else torch.tensor(time_arguments, dtype=torch.float32)
        self._log_snrs = None if log_snrs is None else torch.tensor(log_snrs, dtype=torch.float32)
        self._input_scales = None if input_scales is None else torch.tensor(input_scales, dtype=torch.float32)

    @staticmethod
    def wrap(
        unet: nn.Module,
        head: Head | None,
        time_arguments: Sequence[float] | None = None,
        log_snrs: Sequence[float] | None = None,
        prediction_type: str = "epsilon",
        class_label: int | None = None,
        input_scales: Sequence[float] | None = None,
    ) -> UNetWithHead:
        """Join a U-Net and a head. Both are shared, not copied."""
        config: Any = unet.config
        wrapped = UNetWithHead(
            {**dict(config), "_class_name": type(unet).__name__},
            None if head is None else head_config(head),
            None if time_arguments is None else [float(a) for a in time_arguments],
            config.in_channels,
            config.sample_size,
            None if log_snrs is None else [float(level) for level in log_snrs],
            prediction_type,
            class_label,
            None if input_scales is None else [float(scale) for scale in input_scales],
        )
        wrapped.backbone, wrapped.moment_head = Backbone.of(unet), head
        return wrapped.eval()  # type: ignore[no-any-return]

    def forward(
        self, sample: Tensor, timestep: int | float | Tensor, return_dict: bool = True
    ) -> UNet2DOutput | tuple[Tensor]:
        """Predict at x_t (B, C, H, W) and a timestep, a number or (B,).

        The output is (B, 2C, H, W), or (B, C, H, W) without a head.
        """
        label = self.config.class_label
        told = {} if label is None else {LABELS: torch.full((len(sample),), label, device=sample.device)}
        seen = sample
        if self._input_scales is not None:
            seen = per_sample(_at(self._input_scales, timestep, sample.device).expand(len(sample)), sample) * sample
        output = self.backbone(seen, self._argument(timestep, sample.device).expand(len(sample)), **told)
        prediction = output.output
        if self.moment_head is not None:
            raw = prediction[:, : sample.shape[1]]
            levels = (
                None if self._log_snrs is None else _at(self._log_snrs, timestep, sample.device).expand(len(sample))
            )
            predicted = None
            if self.moment_head.needs_prediction and levels is not None:
                predicted = _predicted(raw, sample, levels, self.config.prediction_type, self.moment_head.unit)
            moment = self.moment_head(output.features, output.time_embedding, levels, predicted, output.activation)
            prediction = torch.cat([raw, moment], dim=1)
        return UNet2DOutput(sample=prediction) if return_dict else (prediction,)

    def _argument(self, timestep: int | float | Tensor, device: torch.device) -> Tensor:
        """The U-Net's time as float32: a Python number would be truncated there."""
        if self._time_arguments is None:
            return torch.as_tensor(timestep, dtype=torch.float32, device=device)
        return _at(self._time_arguments, timestep, device)


def _predicted(raw: Tensor, x_t: Tensor, log_snr: Tensor, prediction_type: str, unit: str) -> Tensor:
    """What an output (B, C, H, W) says in a unit, at log-SNR (B,) of a variance-preserving schedule."""
    level = log_snr.double()
    signal, spread = torch.sigmoid(level).sqrt(), torch.sigmoid(-level).sqrt()
    return Prediction(x_t, 0.0, raw, prediction_type, signal, spread).in_unit(unit).to(raw.dtype)


def _at(table: Tensor, timestep: int | float | Tensor, device: torch.device) -> Tensor:
    return table.to(device)[torch.as_tensor(timestep, device=device).long()]
