"""Train the embedded Fashion-MNIST classifier: python scripts/train_fashion_classifier.py DATA OUT.

DATA holds the idx files (optcov data fashion-mnist DATA). OUT gets classifier.safetensors (float16) and
training.json with the settings and the test accuracy of the very file that was written. About a quarter of an hour
of one CPU core.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from optcov import data, storage
from optcov.metrics.classifier import CHANNELS, POOL_BEFORE, FashionClassifier, load_classifier

console = Console()


class TrainingNetwork(nn.Module):
    """The classifier with batch normalisation behind every convolution, which `folded` removes."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = FashionClassifier()
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for channels in CHANNELS[1:]])
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes, (B, 10)."""
        h = images
        for number, (convolution, norm) in enumerate(zip(self.classifier.convolutions, self.norms, strict=True)):
            if number in POOL_BEFORE:
                h = nn.functional.max_pool2d(h, 2)
            h = norm(convolution(h)).relu()
        return self.classifier.logits(self.dropout(h.mean((2, 3))))

    def folded(self) -> FashionClassifier:
        """Multiply each normalisation into its convolution."""
        result = FashionClassifier()
        result.load_state_dict(self.classifier.state_dict())
        with torch.no_grad():
            for convolution, norm in zip(result.convolutions, self.norms, strict=True):
                scale = norm.weight / (norm.running_var + norm.eps).sqrt()
                convolution.weight *= scale[:, None, None, None]
                convolution.bias.copy_((convolution.bias - norm.running_mean) * scale + norm.bias)
        return result


def train(images: data.ImageSet, epochs: int, batch: int, rate: float, seed: int) -> TrainingNetwork:
    """AdamW with one cycle of the learning rate, mirror images, label smoothing."""
    torch.manual_seed(seed)
    network = TrainingNetwork().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.02)
    per_epoch = len(images) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * per_epoch, pct_start=0.2)
    for epoch in range(epochs):
        start, total = time.monotonic(), 0.0
        for index in torch.randperm(len(images))[: per_epoch * batch].view(per_epoch, batch):
            scores = network(data.flip_half(images.x_0(index)))
            loss = nn.functional.cross_entropy(scores, images.labels[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        console.print(f"epoch {epoch + 1}: loss {total / per_epoch:.4f}, {time.monotonic() - start:.0f} s")
    return network


def accuracy(classifier: FashionClassifier, images: data.ImageSet) -> float:
    """Share of images that get their label."""
    with torch.no_grad():
        guesses = torch.cat([classifier.logits(classifier(batch)).argmax(1) for batch in images.batches(500)])
    return float((guesses == images.labels).double().mean())


def main() -> None:
    """Train, fold, write, read back, and state the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train_set, test_set = (data.load(options.data, split) for split in ("train", "test"))
    network = train(train_set, options.epochs, options.batch, options.rate, options.seed)
    path = options.out / "classifier.safetensors"
    storage.write_tensors(path, {name: w.half() for name, w in network.eval().folded().state_dict().items()})
    record = {
        "test_accuracy": accuracy(load_classifier(path), test_set),
        "train_data": train_set.checksum,
        "test_data": test_set.checksum,
        **{name: getattr(options, name) for name in ("epochs", "batch", "rate", "seed")},
        "torch": torch.__version__,
    }
    storage.write_json(options.out / "training.json", record)
    console.print(f"test accuracy {record['test_accuracy']:.4f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
