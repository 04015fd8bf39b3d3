"""A small classifier of Fashion-MNIST, embedded in the package as a feature extractor for Frechet distances.

Five convolutions with ReLU, of which the last is averaged over the image: 96 features. Batch normalisation is
folded into the convolutions after training (scripts/train_fashion_classifier.py).
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from optcov import storage

CHANNELS = (1, 24, 48, 48, 96, 96)
POOL_BEFORE = (1, 3)  # halve the image before these convolutions: 28, 14, 7 pixels
CLASSES = 10
IMAGE_SHAPE = (1, 28, 28)


@final
class FashionClassifier(nn.Module):
    """Images in [-1, 1], (B, 1, 28, 28), to features (B, 96); `logits` goes on to the ten classes."""

    def __init__(self) -> None:
        super().__init__()
        pairs = pairwise(CHANNELS)
        self.convolutions = nn.ModuleList([nn.Conv2d(inner, outer, 3, padding=1) for inner, outer in pairs])
        self.output = nn.Linear(CHANNELS[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Features, (B, 96)."""
        if images.shape[1:] != IMAGE_SHAPE:
            raise ValueError(
                f"the fashion classifier takes images (B, 1, 28, 28) in [-1, 1], got {tuple(images.shape)}; "
                f"choose a feature extractor made for such images"
            )
        h = images
        for number, convolution in enumerate(self.convolutions):
            if number in POOL_BEFORE:
                h = nn.functional.max_pool2d(h, 2)
            h = convolution(h).relu()
        return h.mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """Scores of the ten classes, (B, 10), from features."""
        scores: Tensor = self.output(features)
        return scores


@cache
def fashion_classifier() -> FashionClassifier:
    """The embedded classifier, in eval mode."""
    with resources.as_file(resources.files("optcov") / "models" / "fashion-classifier") as directory:
        return load_classifier(directory / "classifier.safetensors")


def load_classifier(path: Path) -> FashionClassifier:
    """Load weights; they are stored as float16 and used as float32."""
    tensors, _ = storage.read_tensors(path)
    network = FashionClassifier()
    try:
        network.load_state_dict({name: tensor.to(torch.float32) for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise storage.StorageError(f"{path} is not a fashion classifier: {error}") from error
    return network.eval().requires_grad_(False)
