"""Networks of diffusers with a head: the network's own class, forward pass and output, and a head that speaks beside.

`UNet2DConditionModelWithHead`, `FluxTransformer2DModelWithHead` and so on are subclasses of the classes that they are
named after, so that pipelines find everything they ask for. What the head says of a batch is left for the scheduler
(see `optcov.integrations.mailbox`). save_pretrained and from_pretrained keep the head with the network.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from optcov.bundle.schedules import build_schedule
from optcov.integrations import mailbox
from optcov.integrations.extending import extended
from optcov.networks import Backbone, Head, HeadedNetwork, TimeArgument, build_head, head_config
from optcov.networks.calls import CALLS, pack, unpack
from optcov.networks.classes import LABELS, class_entries

__all__ = ["ModelMixin", "headed_class", "unwrap", "wrap"]  # from_pretrained looks here for the mixin of a class
_HEADED: dict[Any, Any] = {}
ENDING, READER, HEAD = "WithHead", "_optcov_reader", "moment_head"


def __getattr__(name: str) -> Any:
    """The class of a network with a head, by its name; made when it is first asked for."""
    base = name.removesuffix(ENDING)
    if not name.endswith(ENDING) or base not in CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import diffusers

    return headed_class(getattr(diffusers, base))


def headed_class(base: Any) -> Any:
    """The subclass of a network's class that has a head; always the same one."""
    if base not in _HEADED:
        _HEADED[base] = _new_class(base)
    return _HEADED[base]


def _new_class(base: Any) -> Any:
    signature = inspect.signature(base.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        run = lambda: base.forward(self, *args, **kwargs)  # noqa: E731
        return _with_head(self, run, given)

    body = {
        "__init__": extended(base, {"optcov": None}, _prepare),
        "forward": forward,
        "__module__": __name__,
        "__doc__": f"A {base.__name__} with a head beside its output.",
    }
    return type(f"{base.__name__}{ENDING}", (base,), body)


def wrap(network: nn.Module, head: Head | None, settings: Mapping[str, Any]) -> nn.Module:
    """Join a network and a head; the weights of both are shared, not copied.

    settings: link, schedule, parameterisation, scale and shift of the time argument, whether the head is the network's
    own learned range, and whether the squared prediction is subtracted from the head's output.
    """
    plain = unwrap(network)
    kind = headed_class(type(plain))
    wrapped: Any = _shared(plain, kind)
    wrapped.register_to_config(optcov={**settings, "head": None if head is None else head_config(head)})
    wrapped.moment_head = head
    return wrapped.eval()  # type: ignore[no-any-return]


def unwrap(network: nn.Module) -> nn.Module:
    """The network without its head; itself, if it has none."""
    kind = type(network)
    if not (kind.__module__ == __name__ and kind.__name__.endswith(ENDING)):
        return network
    plain: Any = _shared(network, kind.__mro__[1])
    plain._modules.pop("moment_head", None)
    known = {name: value for name, value in plain.config.items() if name != "optcov"}
    plain._internal_dict = type(plain.config)(known)
    return plain  # type: ignore[no-any-return]


def _shared(network: nn.Module, kind: Any) -> nn.Module:
    """The same weights as a module of another class."""
    other: nn.Module = kind.__new__(kind)
    other.__dict__.update(network.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        other.__dict__[name] = dict(network.__dict__[name])
    other.__dict__.pop(READER, None)  # it belongs to another head
    return other


def _prepare(network: Any) -> None:
    settings = network.config["optcov"]
    if settings is None:
        raise ValueError(
            f"a {type(network).__name__} needs its head; make one by optcov.attach(pipeline, bundle, method)"
        )
    network.moment_head = None if settings["head"] is None else build_head(settings["head"])


@final
class _Reader:
    """A head's estimate at what a pipeline tells a network."""

    def __init__(self, network: Any):
        self.settings = settings = network.config["optcov"]
        self.packed = "FluxTransformer2DModel" in (kind.__name__ for kind in type(network).__mro__)
        entries = class_entries(network)
        self.empty_class = None if entries is None else entries - 1
        self.argument = TimeArgument(settings["scale"], settings["shift"])
        known = (self.argument, settings["parameterisation"], settings["range"])
        heads = {} if network.moment_head is None else {HEAD: network.moment_head}
        # shared, and no module of the network, which holds the head itself
        self.headed = HeadedNetwork(Backbone.of(network), build_schedule(settings["schedule"]), heads, *known)

    def pictures(self, given: Mapping[str, Any]) -> Tensor:
        """The data that the network sees, (B, C, H, W)."""
        x: Tensor = given["sample"] if "sample" in given else given["hidden_states"]
        if not self.packed:
            return x
        rows, columns = (int(given["img_ids"][..., axis].max()) + 1 for axis in (1, 2))
        return unpack(x, 2 * rows, 2 * columns)

    def times(self, timestep: Any, count: int) -> Tensor:
        """Times of the schedule, (B,), by what the network is told."""
        told = torch.as_tensor(timestep).detach().double().cpu().reshape(-1)
        t = told / self.argument.scale + self.argument.shift
        t = self.headed.schedule.nearest(t)
        return t.expand(count) if len(t) == 1 else t

    def is_guided(self, x: Tensor, labels: Tensor | None) -> bool:
        """Whether this is a batch of a guided DiT: the same data twice, the second time without a class."""
        if labels is None or self.empty_class is None or len(x) % 2:
            return False
        half, empty = len(x) // 2, labels == self.empty_class
        return bool(empty[half:].all()) and not bool(empty[:half].all()) and torch.equal(x[:half], x[half:])


def _with_head(network: Any, run: Any, given: Mapping[str, Any]) -> Any:
    """Run a network as a pipeline calls it, and leave what its head says."""
    reader = network.__dict__.get(READER)
    if reader is None:
        reader = network.__dict__[READER] = _Reader(network)
    x = reader.pictures(given)
    kept: list[Any] = []

    def raw() -> Tensor:
        kept.append(run())
        answer = kept[0]
        output: Tensor = answer[0] if isinstance(answer, tuple) else answer.sample
        return unpack(output, *x.shape[2:]) if reader.packed else output

    seen = reader.headed.backbone.watched(raw, x)
    times = reader.times(given["timestep"], len(x))
    head = network.moment_head
    if head is not None and next(head.parameters()).dtype != torch.float32:
        head.float()  # whatever precision the pipeline was moved to: variances are not for halves
    lifted = x.float() if x.dtype.itemsize < 4 else x
    prediction = reader.headed.predict_from(seen, lifted, times)
    said = prediction.heads["range" if head is None else HEAD]
    if reader.settings.get("less_square"):
        said = said - prediction.in_unit(prediction.units[HEAD]).square()
    if reader.is_guided(x, given.get(LABELS)):
        said = mailbox.both_halves(said)  # a guided DiT steps with both halves of its batch
    told = float(torch.as_tensor(given["timestep"]).reshape(-1)[0])
    mailbox.leave(reader.settings["link"], pack(said) if reader.packed else said, told)
    return kept[0]
