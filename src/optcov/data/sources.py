"""Where images come from: one name or path, recognised by what lies there.

source                                     splits
directory with idx files (MNIST family)    the published ones
directory with CIFAR-10 batches            the published ones
directory of image files                   its sub-directories train and test, or a random 90 % and 10 %
file.npz                                   arrays named train and test, or a random 90 % and 10 %
file.npy                                   a random 90 % and 10 %, the same each time
hf:NAME                                    those of the Hugging Face data set
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import torch

from optcov.data.arrays import load_npy, load_npz, npz_splits
from optcov.data.cifar import BATCHES, find_batches, load_cifar
from optcov.data.folders import load_folder
from optcov.data.huggingface import load_hub
from optcov.data.idx import is_idx_directory, load_idx
from optcov.data.images import DataError, ImageSet
from optcov.storage import as_path

SPLITS = ("train", "test", "all")
TEST_SHARE = 0.1  # of a source without splits
HUB_PREFIX = "hf:"
FASHION_MNIST = (  # checksums of its training and test images
    "0a9ee897a7afb6dd4c155e91561cbe3e6d188ca68f163d751bffa7c99147e70d",
    "1f464896e3773fa498975dd234ac880af8e80a48f673c4e1358207b203a3932f",
)


def load(source: str | Path, split: str = "train") -> ImageSet:
    """Load one split of a source of images; the module's docstring lists the sources.

    split: "train", "test" or "all". If the source has no splits, a tenth of its images is the test split. The same
    images in the same order give the same split.
    """
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    as_path(source, DataError)
    try:
        return _load(source, split)
    except MemoryError as error:  # of a limit that the free memory does not tell of
        raise DataError(f"{source} does not fit into the memory that this process may use") from error


def load_mixed(source: str | Path, split: str = "train") -> ImageSet:
    """Load one split in an order whose first images are typical of all, since files are often sorted by class.

    Fashion-MNIST and CIFAR-10 are published in such an order (MNIST's test set begins with the easy half). Other
    sources are shuffled, in an order that depends on their number of images.
    """
    images = load(source, split)
    path = Path(source)
    cifar = path.is_dir() and any(find_batches(path, part) for part in BATCHES)
    if cifar or images.checksum in FASHION_MNIST:
        return images
    return images.select(torch.randperm(len(images), generator=torch.Generator().manual_seed(0)))


def _load(source: str | Path, split: str) -> ImageSet:
    if split != "all":
        images, own_split = _load_split(source, split)
        return images if own_split else images.split(TEST_SHARE)[split == "test"]
    if Path(source).suffix == ".npz" and Path(source).is_file():
        return reduce(join, [load_npz(Path(source), part)[0] for part in npz_splits(Path(source)) or ["train"]])
    images, own_split = _load_split(source, "train")
    return join(images, _load_split(source, "test")[0]) if own_split else images


def join(first: ImageSet, second: ImageSet) -> ImageSet:
    """Join two sets to one, the second after the first."""
    if first.shape != second.shape:
        raise DataError(f"images of {first.name} are {first.shape}, those of {second.name} are {second.shape}")
    labels = None
    if first.labels is not None and second.labels is not None:
        labels = torch.cat([first.labels, second.labels])
    captions = None if first.captions is None or second.captions is None else first.captions + second.captions
    return ImageSet(torch.cat([first.images, second.images]), labels, f"{first.name} + {second.name}", captions)


def _load_split(source: str | Path, split: str) -> tuple[ImageSet, bool]:
    """Load a split and tell whether the source has splits; without them, load all."""
    if str(source).startswith(HUB_PREFIX):
        name = str(source)[len(HUB_PREFIX) :]
        if not name.strip():
            raise DataError(f"{source} names no data set; give hf:NAME, such as hf:ylecun/mnist")
        return load_hub(name, split), True
    path = Path(source)
    if path.is_dir():
        return _load_directory(path, split)
    if not path.is_file():
        raise DataError(
            f"no images at {source}: give a directory, a .npz or .npy file, or hf:NAME "
            f"(optcov data fashion-mnist DIR fetches some)"
        )
    if path.suffix == ".npz":
        return load_npz(path, split)
    if path.suffix == ".npy":
        return load_npy(path), False
    raise DataError(f"{source} is not a .npz or .npy file; put single images into a directory")


def _load_directory(path: Path, split: str) -> tuple[ImageSet, bool]:
    if is_idx_directory(path):
        return load_idx(path, split), True
    batches = find_batches(path, split)
    if batches is not None:
        return load_cifar(batches, split), True
    parts = [path / "train", path / "test"]
    if all(part.is_dir() for part in parts):
        return load_folder(path / split, parts), True
    return load_folder(path), False
