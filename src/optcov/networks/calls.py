"""How each network of diffusers is called: call(module, x, time, **condition) -> tensor, (B, C or 2C, H, W).

The rest of the package knows this one contract. What a family wants in another form (added conditions in a dictionary,
latents packed into tokens) is known here and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn

DEFAULT_FLUX_GUIDANCE = 3.5  # of FluxPipeline; a condition of networks that were distilled with one
_NOT_CONDITIONS = ("self", "x", "x_t", "sample", "hidden_states", "time", "timestep", "t", "sigma", "return_dict")


@final
@dataclass(frozen=True)
class Call:
    """How one class of networks is called."""

    names: tuple[str, ...]  # what it may be told besides x and time
    example: Callable[[Any], dict[str, tuple[int, ...]]] | None  # config -> shapes of what it must be told
    run: Callable[..., Any]  # (module, x, time, condition) -> tensor or an object with .sample


def call_of(module: nn.Module) -> Call | None:
    """How a network is called; None for one of another class, which is called as module(x, time, **condition)."""
    kind: type = type(module)
    return _call_of_class(kind)


@cache
def _call_of_class(kind: type) -> Call | None:
    names = (base.__name__ for base in kind.__mro__)
    return next((CALLS[name] for name in names if name in CALLS), None)


def condition_names(module: nn.Module) -> tuple[str, ...] | None:
    """What a network may be told besides x and time; None if anything."""
    known = call_of(module)
    if known is not None:
        return known.names
    taken = inspect.signature(module.forward).parameters
    if any(entry.kind is inspect.Parameter.VAR_KEYWORD for entry in taken.values()):
        return None
    return tuple(name for name in taken if name not in _NOT_CONDITIONS)


def takes_texts(module: nn.Module) -> bool:
    """Whether a network of diffusers is told encoded captions."""
    known = call_of(module)
    return known is not None and _TEXT in known.names


def call(module: nn.Module, x: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
    """Run a network once at x (B, C, H, W) and its own time argument (B,)."""
    kind: type = type(module)
    known = _call_of_class(kind)
    if known is None:
        return _tensor(module(x, time, **condition), module)
    if known.example is not None:
        require_told(module, condition)
    if condition:
        condition = {name: v.to(x.dtype) if v.is_floating_point() else v for name, v in condition.items()}
    return _tensor(known.run(module, x, time, condition), module)


def require_told(module: nn.Module, condition: Mapping[str, Tensor]) -> None:
    """Refuse to run a network of diffusers without what it must be told."""
    known = call_of(module)
    needed = {} if known is None or known.example is None else known.example(module.config)
    missing = [name for name in needed if name not in condition]
    if missing:
        raise ValueError(
            f"{type(module).__name__} needs the condition {missing[0]!r}, and none is told; from Python pass "
            f"condition={{{', '.join(f'{name!r}: ...' for name in needed)}}}, each with one entry per image"
        )


def example_of(module: nn.Module) -> dict[str, Tensor]:
    """Something that a network can be told, each (1, ...), on "meta": its shapes are right, it has no values."""
    known = call_of(module)
    shapes = {} if known is None or known.example is None else known.example(module.config)
    kinds = {"class_labels": torch.int64}
    return {
        name: torch.empty(1, *shape, device="meta", dtype=kinds.get(name, torch.float32))
        for name, shape in shapes.items()
    }


def check_widths(module: nn.Module, condition: Mapping[str, Tensor]) -> None:
    """Refuse texts whose entries have other axes or another width than a network of diffusers takes."""
    known = call_of(module)
    shapes = {} if known is None or known.example is None else known.example(module.config)
    for name in (_TEXT, _POOLED):
        if name not in condition or name not in shapes:
            continue
        found, wanted = tuple(condition[name].shape[1:]), shapes[name]
        if len(found) != len(wanted) or found[-1] != wanted[-1]:
            told = ", ".join([*["any"] * (len(wanted) - 1), str(wanted[-1])]) + "," * (len(wanted) == 1)
            raise ValueError(
                f"condition {name!r} has entries of shape {found}, but {type(module).__name__} takes ({told}); encode "
                f"texts by the encoders that it was trained with"
            )


def image_channels(module: nn.Module) -> tuple[int, int]:
    """Channels of the images that a network of diffusers takes and returns."""
    config: Any = module.config
    taken = int(config["in_channels"])
    found = taken, int(config.get("out_channels") or taken)
    packed = 4 if any(kind.__name__ == "FluxTransformer2DModel" for kind in type(module).__mro__) else 1
    return found[0] // packed, found[1] // packed


def pack(x: Tensor) -> Tensor:
    """Latents (B, C, H, W) as tokens of 2 x 2 patches, (B, H W / 4, 4 C), as Flux takes them."""
    batch, channels, height, width = x.shape
    if height % 2 or width % 2:
        raise ValueError(f"Flux packs latents by 2 x 2, but these are {height} x {width}; use even sides")
    patches = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height // 2 * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Latents (B, C, H, W) of tokens (B, H W / 4, 4 C)."""
    batch, _, channels = tokens.shape
    patches = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, height, width)


def _tensor(raw: Any, module: nn.Module) -> Tensor:
    """The prediction in what a network returns: a tensor, the first of several, or what is called sample."""
    if isinstance(raw, Tensor):
        return raw
    first = raw[0] if isinstance(raw, tuple | list) and len(raw) else raw
    found = first.get("sample") if isinstance(first, Mapping) else getattr(first, "sample", first)
    if isinstance(found, Tensor):
        return found
    name = getattr(getattr(module, "function", None), "__name__", None) or type(module).__name__
    kind = type(found if isinstance(raw, tuple | list) else raw).__name__
    raise ValueError(
        f"{name} returns a {kind}, in which no prediction is found; return a tensor, a tuple that begins with one, or "
        f"an object with one as its sample"
    )


def _part(condition: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: condition[name] for name in names if name in condition}


def _plain(module: Any, x: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Any:
    return module(x, time, **condition)


def _conditional_unet(module: Any, x: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Any:
    """Stable Diffusion; XL has the pooled text and the sizes of the picture besides."""
    added = _part(condition, "text_embeds", "time_ids")
    others = {name: value for name, value in condition.items() if name not in added}
    return module(x, time, **others, **({"added_cond_kwargs": added} if added else {}))


def _pixart(module: Any, x: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Any:
    added: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    added |= _part(condition, "resolution", "aspect_ratio")
    others = _part(condition, "encoder_hidden_states", "encoder_attention_mask")
    return module(x, timestep=time, added_cond_kwargs=added, **others)


def _sd3(module: Any, x: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Any:
    return module(x, timestep=time, **condition)


def _flux(module: Any, x: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
    height, width = x.shape[2:]
    text = condition["encoder_hidden_states"]
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows, columns], -1).reshape(-1, 3)
    guidance = condition.get("guidance")
    if guidance is None and module.config.guidance_embeds:
        guidance = torch.full((len(x),), DEFAULT_FLUX_GUIDANCE)
    raw = module(
        pack(x),
        timestep=time,
        guidance=None if guidance is None else guidance.to(x.device, torch.float32),
        pooled_projections=condition["pooled_projections"],
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, device=x.device, dtype=x.dtype),
        img_ids=places.to(x.device, x.dtype),
    )
    return unpack(_tensor(raw, module), height, width)


def _unet_example(config: Any) -> dict[str, tuple[int, ...]]:
    width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
    told: dict[str, tuple[int, ...]] = {_TEXT: (2, width if isinstance(width, int) else width[-1])}
    if config["addition_embed_type"] == "text_time":
        sizes = 6 * config["addition_time_embed_dim"]
        told |= {"text_embeds": (config["projection_class_embeddings_input_dim"] - sizes,), "time_ids": (6,)}
    return told


def _pixart_example(config: Any) -> dict[str, tuple[int, ...]]:
    told: dict[str, tuple[int, ...]] = {_TEXT: (2, config["caption_channels"]), "encoder_attention_mask": (2,)}
    added = config["use_additional_conditions"]
    if added or (added is None and config["sample_size"] == PIXART_LARGE):
        told |= {"resolution": (2,), "aspect_ratio": (1,)}
    return told


def _two_texts_example(config: Any) -> dict[str, tuple[int, ...]]:
    return {_TEXT: (2, config["joint_attention_dim"]), _POOLED: (config["pooled_projection_dim"],)}


_TEXT, _POOLED = "encoder_hidden_states", "pooled_projections"
PIXART_LARGE = 128  # side of the latents of the PixArt that is told resolution and aspect ratio
CALLS: Mapping[str, Call] = {
    "UNet2DModel": Call(("class_labels",), None, _plain),
    "DiTTransformer2DModel": Call(("class_labels",), lambda config: {"class_labels": ()}, _plain),
    "UNet2DConditionModel": Call(
        (_TEXT, "class_labels", "timestep_cond", "encoder_attention_mask", "text_embeds", "time_ids"),
        _unet_example,
        _conditional_unet,
    ),
    "PixArtTransformer2DModel": Call(
        (_TEXT, "encoder_attention_mask", "resolution", "aspect_ratio"), _pixart_example, _pixart
    ),
    "SD3Transformer2DModel": Call((_TEXT, _POOLED), _two_texts_example, _sd3),
    "FluxTransformer2DModel": Call((_TEXT, _POOLED, "guidance"), _two_texts_example, _flux),
}
