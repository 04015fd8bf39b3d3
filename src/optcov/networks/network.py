"""A denoiser with heads: the callable (x_t, t, **condition) -> Prediction that the rest of the package uses.

backbone(x_t, argument(t), **condition) -> raw output, features, time embedding
prediction = interpreted raw output,  heads = {name: head(features, time embedding)}           (Eq. 17)
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from optcov.gaussian import per_sample
from optcov.identity import condition_identity, digest, known_by
from optcov.networks.backbone import Backbone, BackboneOutput, fingerprint
from optcov.networks.heads import Head, head_config
from optcov.networks.times import TimeArgument, TimeMatch
from optcov.networks.unet_config import same_setting
from optcov.prediction import Prediction, check_kind
from optcov.schedule import Schedule, Time


@final
class HeadedNetwork(nn.Module):
    """A backbone, the schedule it was trained on, and any number of heads.

    schedule: the backbone's own schedule. The times t of a call belong to it, unless `with_schedule` sets another one.
    time_argument: (t - shift) * scale, the time input of the backbone. By default shift is 0, and scale is
    `schedule.argument_scale`: 1000 / N for discrete times, 999 for VP and VE SDEs, 1000 for flow matching, 1 for EDM.
    parameterisation: what the backbone's output means, see optcov.prediction.
    learned_range: True if the output has twice the channels: noise, and the v of Improved DDPM.
    empty_condition: the condition that stands for no condition, each entry (1, ...).
    """

    def __init__(
        self,
        backbone: Backbone,
        schedule: Schedule,
        heads: Mapping[str, Head] | None = None,
        time_argument: TimeArgument | None = None,
        parameterisation: str = "epsilon",
        learned_range: bool = False,
        empty_condition: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.backbone = backbone
        self.native_schedule = schedule
        self.schedule = schedule
        self.heads = nn.ModuleDict(dict(heads or {}))
        self.time_argument = time_argument or TimeArgument.default(schedule)
        self.parameterisation = check_kind(parameterisation)
        self.learned_range = learned_range
        self._match: TimeMatch | None = None
        self._empty = tuple(empty_condition or ())
        for name, value in (empty_condition or {}).items():  # buffers move with the network; a file of weights has none
            self.register_buffer(f"empty_{name}", value, persistent=False)

    @property
    def empty_condition(self) -> dict[str, Tensor]:
        """The condition that stands for no condition, each entry (1, ...). The backbone gets it if a call has none."""
        return {name: self.get_buffer(f"empty_{name}") for name in self._empty}

    @property
    def output_heads(self) -> tuple[str, ...]:
        """Names of the heads that are part of the backbone's own output."""
        return ("range",) if self.learned_range else ()

    def with_heads(self, heads: Mapping[str, Head]) -> HeadedNetwork:
        """Use the same weights with these heads and no others."""
        return self._sharing(heads=nn.ModuleDict(dict(heads)))

    def with_only_heads(self, *names: str) -> HeadedNetwork:
        """Use the same weights with these heads alone, which saves time. Unknown names are ignored."""
        return self.with_heads({name: self.heads[name] for name in names if name in self.heads})  # type: ignore[misc]

    def with_empty_condition(self, empty_condition: Mapping[str, Tensor]) -> HeadedNetwork:
        """Use the same weights with another empty condition."""
        return self._sharing(empty_condition=empty_condition)

    def with_schedule(self, schedule: Schedule) -> HeadedNetwork:
        """Use the same weights at times of another schedule.

        Times are matched by log-SNR, or by alpha-bar if both schedules preserve variance.
        """
        other = self._sharing()
        other.schedule, other._match = schedule, TimeMatch(schedule, self.native_schedule)
        return other

    def on_its_own_schedule(self) -> HeadedNetwork:
        """Use the same weights at times of the schedule they were trained on."""
        if self._match is None:
            return self
        other = self._sharing()
        other.schedule, other._match = self.native_schedule, None
        return other

    def identity(self, heads: Collection[str] | None = None) -> dict[str, Any]:
        """Everything that the predictions depend on, by name; see optcov.identity.

        heads: the heads to include, by default all.
        """
        own, used = self.native_schedule.identity(), self.schedule.identity()
        argument = self.time_argument
        dtype = next((weight.dtype for weight in self.backbone.parameters()), torch.float32)
        return {
            "weights": known_by(fingerprint(self.backbone.module)),
            "network": known_by(digest([_settings(self.backbone.module), self.backbone.tap])),
            "heads": {
                name: known_by(digest([head_config(head), fingerprint(head)]))  # type: ignore[arg-type]
                for name, head in self.heads.items()
                if heads is None or name in heads
            },
            "schedule": used,
            **({"own schedule": own} if own != used else {}),
            "time argument": known_by(
                digest([argument.shift, argument.scale]), f"(t - {argument.shift:g}) * {argument.scale:g}"
            ),
            "prediction type": self.parameterisation,
            "learned range": self.learned_range,
            **({"empty condition": condition_identity(self.empty_condition)} if self._empty else {}),
            # the fingerprint of weights does not tell it, but the numbers differ
            **({} if dtype == torch.float32 else {"precision": str(dtype).removeprefix("torch.")}),
        }

    def _sharing(
        self, heads: nn.ModuleDict | None = None, empty_condition: Mapping[str, Tensor] | None = None
    ) -> HeadedNetwork:
        """The same with other heads, or another empty condition."""
        empty = self.empty_condition if empty_condition is None else empty_condition
        settings = (self.time_argument, self.parameterisation, self.learned_range, empty)
        other = HeadedNetwork(self.backbone, self.native_schedule, None, *settings)
        other.heads = self.heads if heads is None else heads
        other.schedule, other._match = self.schedule, self._match
        return other.train(self.training)

    def forward(self, x_t: Tensor, t: Time, **condition: Tensor) -> Prediction:
        """Predict at x_t (B, *D) and t, a number or (B,), which are times of `self.schedule`."""
        return self.predict_from(self.features(x_t, t, **condition), x_t, t)

    def features(self, x_t: Tensor, t: Time, **condition: Tensor) -> BackboneOutput:
        """Run the backbone once, without the heads."""
        if self._match is not None and not self._match.same_scale:
            x_t = per_sample(self._match.scale(t), x_t) * x_t
        argument = self.arguments(t)
        if argument.ndim and len(argument) not in (1, len(x_t)):
            raise ValueError(
                f"there are {len(argument)} times for {len(x_t)} data points; pass one time for each, or one"
            )
        argument = argument.to(x_t.device).expand(len(x_t))
        if self._empty:
            condition = self._told(condition, len(x_t))
        output: BackboneOutput = self.backbone(x_t, argument, **condition)
        images, found = x_t.shape[1], output.output.shape[1]
        if found != images * (1 + self.learned_range):
            remedy = "of a network of Improved DDPM return the first half, or pass learned_range=True to HeadedNetwork"
            if found != 2 * images:
                remedy = "use images with as many channels as the network was trained on"
            raise ValueError(
                f"the backbone returned {found} channels for images with {images}, expected "
                f"{images * (1 + self.learned_range)}; {remedy}"
            )
        if output.output.shape[2:] != x_t.shape[2:]:
            raise ValueError(
                f"the backbone returned {tuple(output.output.shape[2:])} pixels for images of "
                f"{tuple(x_t.shape[2:])}; use images of the size and shape that it was made for"
            )
        return output

    def _told(self, condition: dict[str, Tensor], count: int) -> dict[str, Tensor]:
        """The condition, or the empty one for so many images where there is none; half of one is refused."""
        if not condition:
            return {name: value.expand(count, *value.shape[1:]) for name, value in self.empty_condition.items()}
        missing = [name for name in self._empty if name not in condition]
        if missing:
            raise ValueError(
                f"the condition lacks {missing[0]!r}; pass {', '.join(self._empty)}, or no condition at all"
            )
        return condition

    def arguments(self, t: Time) -> Tensor:
        """The backbone's time argument at times of `self.schedule`, float32, () or (B,)."""
        return self.time_argument(self.schedule.check_times(t) if self._match is None else self._match(t))

    def input_scale(self, t: Time) -> Tensor | None:
        """The factor of x_t in `features` at times of `self.schedule`, () or (B,); None if x_t is not scaled."""
        return None if self._match is None or self._match.same_scale else self._match.scale(t)

    def prediction_from(self, output: BackboneOutput, x_t: Tensor, t: Time) -> Prediction:
        """The prediction from an existing backbone output, without heads."""
        raw = output.output[:, : x_t.shape[1]].contiguous()  # what follows mixes it with x_t, pixel by pixel
        signal, spread = self.schedule.levels(t)
        return Prediction(x_t, t, raw, self.parameterisation, signal, spread)

    def predict_from(self, output: BackboneOutput, x_t: Tensor, t: Time) -> Prediction:
        """The prediction from an existing backbone output, with heads."""
        prediction = self.prediction_from(output, x_t, t)
        log_snr = self.schedule.log_snr(t).to(x_t.device, torch.float32).expand(len(x_t))
        heads, units, excesses = {}, {}, []
        for name, head in self.heads.items():
            units[name] = unit = str(head.unit)
            if head.about == "prediction":
                excesses.append(name)
            predicted = prediction.in_unit(unit) if head.needs_prediction else None
            heads[name] = head(output.features, output.time_embedding, log_snr, predicted, output.activation)
        if self.learned_range:
            heads["range"] = output.output[:, x_t.shape[1] :].contiguous()
        return prediction.with_heads(heads, units, excesses)


def _settings(module: nn.Module) -> Any:
    """What beside its weights makes a network: of a diffusers model, the settings that are not the usual ones.

    A later release of diffusers may know more settings; at their usual values they change nothing.
    """
    config = getattr(module, "config", None)
    if not isinstance(config, Mapping):
        return repr(module)
    usual = {name: entry.default for name, entry in inspect.signature(type(module).__init__).parameters.items()}
    chosen = {name: value for name, value in config.items() if not name.startswith("_")}
    return [type(module).__name__, {name: v for name, v in chosen.items() if not same_setting(v, usual.get(name))}]
