"""Pipelines of diffusers, one line each: where their network is, what decodes their latents, what they are told.

What is not in the table is refused by name. `condition` of a family turns captions into what the network takes, by the
pipeline's own text encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from optcov.checkpoints.errors import CheckpointError

Condition = dict[str, Tensor]
# (pipeline, captions, height and width of images, whether what stands for no caption is wanted)
Encode = Callable[[Any, Sequence[str], tuple[int, int], bool], Condition]


@final
@dataclass(frozen=True)
class Family:
    """What is known of a kind of pipeline."""

    name: str  # in words
    network: str  # the pipeline's part that predicts
    model: str  # its class
    decoder: str | None = None  # the part that turns latents into images; None: it draws images
    encode: Encode | None = None  # captions to a condition; None: it takes no captions
    guided: bool = False  # trained for guidance, so that it knows what stands for no caption
    encoders: tuple[str, ...] = ()  # the parts without which captions cannot be encoded
    labels: bool = False  # it takes class labels
    any_size: bool = False  # it takes latents of other sizes than its config says
    time_scale: float | None = None  # of its time argument at real times; None: the schedule's own


def family_of(kind: str, parts: Mapping[str, Any]) -> Family:
    """The family of a pipeline by the name of its class, or a CheckpointError that says what is taken."""
    family = FAMILIES.get(kind)
    if family is None:
        raise CheckpointError(
            f"{kind[:80]} is no pipeline that is known here; known are {', '.join(FAMILIES)}. Of another one give its "
            f"parts: (network, schedule, prediction_type)"
        )
    missing = [name for name in (family.network, family.decoder, "scheduler") if name and parts.get(name) is None]
    if missing:
        raise CheckpointError(f"this {kind} has no {missing[0]}; load the whole pipeline, with its {missing[0]}")
    return family


def _stable_diffusion(pipeline: Any, captions: Sequence[str], size: tuple[int, int], empty: bool) -> Condition:
    return {"encoder_hidden_states": pipeline.encode_prompt(list(captions), pipeline.device, 1, empty)[empty]}


def _xl(pipeline: Any, captions: Sequence[str], size: tuple[int, int], empty: bool) -> Condition:
    """Text, pooled text, and the sizes of a picture that was neither scaled nor cropped."""
    text, pooled = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=empty)[empty::2]
    sizes = torch.tensor([[*size, 0, 0, *size]], dtype=pooled.dtype).repeat(len(text), 1)
    return {"encoder_hidden_states": text, "text_embeds": pooled, "time_ids": sizes.to(text.device)}


def _sd3(pipeline: Any, captions: Sequence[str], size: tuple[int, int], empty: bool) -> Condition:
    found = pipeline.encode_prompt(list(captions), None, None, do_classifier_free_guidance=empty)
    return dict(zip(("encoder_hidden_states", "pooled_projections"), found[empty::2], strict=True))


def _pixart(pipeline: Any, captions: Sequence[str], size: tuple[int, int], empty: bool) -> Condition:
    found = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=empty)
    text, mask = found[2:] if empty else found[:2]
    told = {"encoder_hidden_states": text, "encoder_attention_mask": mask}
    if pipeline.transformer.use_additional_conditions:
        told["resolution"] = torch.tensor([size], dtype=text.dtype).repeat(len(text), 1).to(text.device)
        ratio = torch.tensor([[size[0] / size[1]]], dtype=text.dtype)
        told["aspect_ratio"] = ratio.repeat(len(text), 1).to(text.device)
    return told


def _flux(pipeline: Any, captions: Sequence[str], size: tuple[int, int], empty: bool) -> Condition:
    text, pooled, _ = pipeline.encode_prompt(list(captions), None)
    return {"encoder_hidden_states": text, "pooled_projections": pooled}


_UNET, _TRANSFORMER = "unet", "transformer"
_FREE: dict[str, Any] = {"guided": True, "any_size": True}
_IMAGES = Family("a U-Net of images", _UNET, "UNet2DModel")
_TEXT = ("tokenizer", "text_encoder")
_SECOND = ("tokenizer_2", "text_encoder_2")
_PIXART = Family("PixArt", _TRANSFORMER, "PixArtTransformer2DModel", "vae", _pixart, encoders=_TEXT, **_FREE)
FAMILIES: Mapping[str, Family] = {
    "DDPMPipeline": _IMAGES,
    "DDIMPipeline": _IMAGES,
    "LDMPipeline": Family("a U-Net of latents", _UNET, "UNet2DModel", "vqvae"),
    "DiTPipeline": Family("DiT", _TRANSFORMER, "DiTTransformer2DModel", "vae", labels=True),
    "StableDiffusionPipeline": Family(
        *("Stable Diffusion", _UNET, "UNet2DConditionModel", "vae", _stable_diffusion), encoders=_TEXT, **_FREE
    ),
    "StableDiffusionXLPipeline": Family(
        *("Stable Diffusion XL", _UNET, "UNet2DConditionModel", "vae", _xl), encoders=_SECOND, **_FREE
    ),
    "PixArtAlphaPipeline": _PIXART,
    "PixArtSigmaPipeline": _PIXART,
    "StableDiffusion3Pipeline": Family(
        *("Stable Diffusion 3", _TRANSFORMER, "SD3Transformer2DModel", "vae", _sd3), encoders=_TEXT + _SECOND, **_FREE
    ),
    # distilled with its guidance, so that it never saw an empty caption in its place; it takes sigma itself as time
    "FluxPipeline": Family(
        *("Flux", _TRANSFORMER, "FluxTransformer2DModel", "vae", _flux),
        any_size=True,
        time_scale=1.0,
        encoders=_TEXT + _SECOND,
    ),
}
MODELS = tuple(dict.fromkeys(family.model for family in FAMILIES.values()))  # classes of networks
